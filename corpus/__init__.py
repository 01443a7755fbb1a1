"""Programs of packages on PyPI, planned, run on eight host devices and compared with plain JAX; ``make corpus``."""
