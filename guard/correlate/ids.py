"""Request ids as vLLM makes them.

The client's id E is external; EngineCore and LMCache see `E-<8 hex>` (or E itself, where randomization is off), and
the children of a request with n > 1 are `0_E`, `1_E`, ... with or without that suffix.
"""

import re
from typing import Final

_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}\Z")
_INDEX: Final = re.compile(r"[0-9]{1,4}_")


def join_key(request_id: str) -> str:
    """What an external id and every internal id made from it have in common.

    Two external ids can share a key (when one looks as if it had the suffix); the join then tells requests apart by
    time.
    """
    match = _INDEX.match(request_id)
    if match:
        request_id = request_id[match.end() :]
    return _SUFFIX.sub("", request_id)
