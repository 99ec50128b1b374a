"""The pretended accelerator: what runs on it, on one process or on forked ranks, and the test that reads all of it.

`devices.py` names the device that a test asks for, a real one too; `backend.py` is the pretended one. Every other module has a
`main(device, path)` that runs its table of cases and writes what it found.
"""
