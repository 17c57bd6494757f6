"""`python -m darkroom` is `darkroom`: what torchrun starts."""

from darkroom.cli.application import main

if __name__ == "__main__":
    main()
