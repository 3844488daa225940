"""Moves bytes that are here already: reshape on arrival, and the checksums of what lies in a cache.

Which bytes go where is decided in ``layout``. Memory is given by address or tensor; nothing here knows peers or vLLM.
"""
