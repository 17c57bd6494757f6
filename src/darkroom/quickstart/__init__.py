"""The quickstart: the whole way from pictures to pictures, as one function.

It draws its own pictures (`shapes`), takes them through import, training and generating by the same
public functions a user has (`journey`), and reads off the pixels how good the result is (`score`).
"""

from darkroom.quickstart.journey import FULL, TOY, QuickstartResult, Scale, quickstart

__all__ = ["FULL", "TOY", "QuickstartResult", "Scale", "quickstart"]
