"""An open step on the device: its metadata, and the page tables and buffers that outlive it.

`metadata.py` has the object that layers get, `device_tables.py` the tables that each step updates.
"""
