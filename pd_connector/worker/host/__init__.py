"""A worker's part of host memory: its pages, copies to and from the device, pulls into it."""
