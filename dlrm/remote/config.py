"""Flags of commands that take URIs."""

from dataclasses import dataclass

from dlrm.settings import setting


@dataclass(frozen=True)
class CacheConfig:
    """The place and size of the cache; field names are those of the flags."""

    cache_dir: str | None = setting(
        None,
        "folder of what is fetched from URIs; default: dlrm/remote in the user's cache",
        resumable=True,
    )
    cache_gib: float | None = setting(
        None,
        "size of that folder; default: half of what its disk has left",
        least=0,
        resumable=True,
    )

    @property
    def limit(self) -> int | None:
        """The size in bytes."""
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)
