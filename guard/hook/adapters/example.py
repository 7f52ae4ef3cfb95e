"""ExampleConnector: KV in files on a shared folder, loaded and stored synchronously."""

from typing import Any

from guard.hook.adapters.base import Adapter


class ExampleAdapter(Adapter):
    """It keeps no state before the allocation, so a skip needs nothing; it never rewrites a file that exists."""

    def meta_built(self, meta: Any, *, stores: bool) -> None:
        """Takes the stores out of the step's metadata when they are to be stopped."""
        if not stores and meta.requests:
            meta.requests = [item for item in meta.requests if not item.is_store]
