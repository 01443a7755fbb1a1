"""Programs to plan for: well-known models as full training steps (or inference steps), in full size and tiny.

The full size exists as shapes only. Every program is an ordinary function of pytrees:

>>> from shardwise import zoo
>>> program = zoo.load("t2b")
>>> program.name, program.config, program.roles
('t2b', '2b', ('params', 'optimizer', 'batch'))
>>> program.args[0]["embed"].shape
(256128, 2048)
"""

from .program import ZooError, ZooProgram
from .registry import configs, description, load, names, parse

__all__ = ["ZooError", "ZooProgram", "configs", "description", "load", "names", "parse"]
