"""StraightDP: publishable synthetic images under one differential-privacy budget."""

__version__ = "0.1.0"
