"""What an HDF5 file reads from other files: external links, external storage, the parts of virtual datasets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py

from shardio.errors import OutsideStoreError, ShardIOError
from shardio.location import is_url, local_path


class Links:
    """Says which other files an HDF5 file may lead to: those in its folder, and those that were allowed.

    Args:
        folder: of the file; None if it is no local one, then all others lie outside.
        url: of the file, for errors.
        allow: folders below which other files may be read, or True for all.
    """

    def __init__(self, folder: Path | None, url: str, allow: str | Sequence[str] | bool) -> None:
        named = [] if isinstance(allow, bool) else [allow] if isinstance(allow, str) else list(allow)
        roots = [local_path(one) for one in named if not is_url(one)] + ([] if folder is None else [folder])
        self._roots = [root.resolve() for root in roots]
        self._all = allow is True
        self._url = url

    def check(self, path: Path, what: str) -> None:
        """Raise OutsideStoreError if a file is not allowed; links and ".." are resolved."""
        if self._all or any(path.resolve().is_relative_to(root) for root in self._roots):
            return
        raise OutsideStoreError(
            f"{what} in {self._url} leads to {path}, which lies outside its folder; if you trust it, open the store "
            f"with open_store(..., allow=[{str(path.parent)!r}]), or allow=True for any file"
        )

    def get(self, group: h5py.Group, key: str) -> h5py.Group | h5py.Dataset | None:
        """What a key of a group leads to; None if it leads nowhere."""
        if self._all or _hard(group, key):
            return group.get(key)
        link = group.get(key, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            path = Path(group.file.filename).parent / link.filename
            self.check(path, f"the link {key!r}")
            if not path.is_file():  # HDF5 would look elsewhere
                return None
        node = group.get(key)
        if node is not None:  # a soft link may pass through an external one
            self.check(Path(node.file.filename), f"the link {key!r}")
        return node

    def check_dataset(self, dataset: h5py.Dataset, seen: frozenset[tuple[str, str]] = frozenset()) -> None:
        """Raise OutsideStoreError if a dataset's values lie in files that are not allowed, however often passed on."""
        where = (str(dataset.file.filename), str(dataset.name))
        if self._all or where in seen:
            return
        for name, _, _ in dataset.external or ():
            self.check(Path(name), f"the external storage of {dataset.name!r}")
        for part in dataset.virtual_sources() if dataset.is_virtual else ():
            if part.file_name == ".":
                path = Path(dataset.file.filename)
            else:
                path = Path(dataset.file.filename).parent / part.file_name
                if not path.exists() and Path(part.file_name).exists():
                    path = Path(part.file_name)
                self.check(path, f"the virtual dataset {dataset.name!r}")
            if "%" in part.file_name + part.dset_name or not path.is_file():
                continue
            try:
                with h5py.File(path, "r") as file:
                    source = self.get(file, part.dset_name)
                    if isinstance(source, h5py.Dataset):
                        self.check_dataset(source, seen | {where})
            except ShardIOError:
                raise
            except Exception:  # it cannot be read; said when its values are wanted
                continue


def _hard(group: h5py.Group, key: str) -> bool:
    """Does a key stand for an object of the file itself?"""
    try:
        return bool(group.id.links.get_info(key.encode("utf-8", "surrogateescape")).type == h5py.h5l.TYPE_HARD)
    except (KeyError, RuntimeError):  # a path, or no such key
        return False
