"""darkroom takes Stable Diffusion models through their whole life: import, prepare, train, generate, measure.

Importing this package changes nothing and is quick: torch is imported by the package that needs it.
"""

__version__ = "0.1.0"
