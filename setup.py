"""Lets tools that still call ``setup.py`` work; all metadata is in pyproject.toml."""

from setuptools import setup

setup()
