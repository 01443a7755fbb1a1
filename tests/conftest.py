"""Eight host devices for every test that runs a sharded program; set before JAX is imported.

LAPACK has one thread: with eight devices that each start one for every core they would wait for each other for minutes.
"""

import os

os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
