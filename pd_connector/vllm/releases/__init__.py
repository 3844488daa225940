"""Differences between the vLLM releases that the connector supports, behind one interface, ``newest.VllmRelease``.

A release that differs has a subclass in a module of its own, ``release_031`` for example, and a line in
``installed.release_of``.
"""
