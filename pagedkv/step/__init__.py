"""An open step on the device: its metadata, and the page tables and buffers that outlive it.

`metadata.py` is what layers are given, `device_tables.py` what one upload a step keeps up to date.
"""
