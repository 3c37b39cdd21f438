"""An emulated x86-64 machine with CXL memory and NVMe devices, on which a script runs under a real Linux kernel.

QEMU and the kernel are Debian packages that are downloaded and unpacked into the cache, never installed. Everything
is emulated (TCG): what it shows is how the kernel's interfaces behave, never how fast hardware is.
"""
