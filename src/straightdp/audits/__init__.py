"""Checks that anyone can run on a release."""
