"""darkroom takes Stable Diffusion models through their whole life: import, prepare, train, generate, measure.

Importing this package is quick: torch and everything heavy is imported by the room that uses it.
"""

import os as _os

# On a busy small machine OpenMP threads that spin without end make a U-Net step up to 30 times
# slower. The runtime reads this when torch is first imported, so it stands before everything.
_os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"
