"""Works on bytes in local memory: copies that reshape what has arrived, and checksums of what a cache holds.

``layout`` decides which bytes go where. Memory is given by address or tensor; nothing here knows peers or vLLM.
"""
