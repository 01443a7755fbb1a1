"""Imports torchax beside a PyTorch that has no overloads for named dimensions any more.

torchax 0.0.13 lists such overloads (``aten.prod.dim_Dimname``), and torch 2.13 has removed them. While torchax is imported, an
overload that does not exist is replaced by a name that nothing calls.
"""

from __future__ import annotations

from typing import Any


def import_torchax() -> Any:
    from torch._ops import OpOverloadPacket

    lookup = OpOverloadPacket.__getattr__

    def tolerant(packet: Any, name: str) -> Any:
        try:
            return lookup(packet, name)
        except AttributeError:
            if "name" not in name.lower():
                raise
            return (str(packet), name)

    OpOverloadPacket.__getattr__ = tolerant
    try:
        import torchax

        torchax.default_env()  # lists further ops
    finally:
        OpOverloadPacket.__getattr__ = lookup
    return torchax
