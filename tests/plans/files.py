"""Plan files that were changed by someone who knows how to write their digest."""

from __future__ import annotations

import json
from typing import Any

from shardwise.plans.codec import digest


def signed(data: Any) -> str:
    """The JSON of a plan with a digest of what it now contains."""
    if not isinstance(data, dict):
        return json.dumps(data)
    content = {key: value for key, value in data.items() if key != "digest"}
    return json.dumps({**content, "digest": digest(content)})
