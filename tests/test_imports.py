"""Imports point downwards only, rules never touch `torch.distributed`, and the package names are what users import."""

import ast
import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "shardtensor": ROOT / "shardtensor",
    "shardio": ROOT / "shardio",
    "shardsets": ROOT / "datasets" / "shardsets",
}
LAYERS = list(PACKAGES)  # lowest first: each may import itself and those before it
RUNTIME_LAYERS = ["errors", "spec", "comm", "rules"]  # of shardtensor, lowest first
# Modules that may use all of torch.distributed; in shardio those that read together, on a group of their own.
COMMUNICATES = {"shardtensor": {"comm", "distribute", "ranks"}, "shardio": {"collective", "bench"}, "shardsets": set()}
# Modules that may use its types: meshes, placements, DTensor.
KNOWS_ITS_TYPES = {"spec", "tensor", "boundary", "buckets", "infer", "promotion"}
TYPES = ("torch.distributed.device_mesh", "torch.distributed.tensor")

FILES = [(path, name) for name, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]
every_file = pytest.mark.parametrize(("path", "package"), FILES, ids=[str(p.relative_to(ROOT)) for p, _ in FILES])


def module_name(path: Path, package: str) -> str:
    """The dotted name of a file, such as `shardtensor.rules.conv`; that of `__init__.py` ends in `.__init__`."""
    return ".".join((package, *path.relative_to(PACKAGES[package]).with_suffix("").parts))


def imported(source: str, module: str) -> set[str]:
    """Absolute names of all that the source of `module` imports or spells out below `torch`, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            names.add(ast.unparse(node))
    return names


def under(name: str, *parents: str) -> bool:
    """Whether `name` is one of `parents` or lies below one."""
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.distributed as dist", "torch.distributed"),
        ("def f():\n    from torch import distributed", "torch.distributed"),
        ("from torch.distributed.tensor import Shard", "torch.distributed.tensor.Shard"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("from ..comm import halo", "shardtensor.comm.halo"),
        ("from . import conv", "shardtensor.rules.conv"),
        ("from .conv import convolution", "shardtensor.rules.conv.convolution"),
    ],
)
def test_every_spelling_of_an_import_is_seen(source: str, found: str) -> None:
    assert found in imported(source, "shardtensor.rules.pool")


@every_file
def test_no_import_goes_up(path: Path, package: str) -> None:
    module = module_name(path, package)
    above = LAYERS[LAYERS.index(package) + 1 :]
    part = module.split(".")[1]
    if package == "shardtensor" and part in RUNTIME_LAYERS:
        above += [f"shardtensor.{name}" for name in RUNTIME_LAYERS[RUNTIME_LAYERS.index(part) + 1 :]]
    upwards = {name for name in imported(path.read_text("utf-8"), module) if under(name, *above)}
    assert not upwards, f"{module} imports {sorted(upwards)} from a layer above its own"


@every_file
def test_only_the_parts_that_communicate_know_torch_distributed(path: Path, package: str) -> None:
    module = module_name(path, package)
    part = module.split(".")[1]
    names = {name for name in imported(path.read_text("utf-8"), module) if under(name, "torch.distributed")}
    if part in COMMUNICATES[package]:
        return
    if package == "shardtensor" and part in KNOWS_ITS_TYPES:
        names = {name for name in names if not under(name, *TYPES)}
    assert not names, f"{module} uses {sorted(names)}; call shardtensor.comm, take placements from shardtensor.spec"


@pytest.mark.parametrize("package", LAYERS)
def test_packages_are_imported_from_this_tree(package: str) -> None:
    assert Path(importlib.import_module(package).__file__ or "").parent == PACKAGES[package]


def test_the_wheel_holds_exactly_these_packages() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    assert [ROOT / folder for folder in build["targets"]["wheel"]["packages"]] == list(PACKAGES.values())


def test_the_extra_that_an_error_names_installs_the_library() -> None:
    from shardio.extras import EXTRAS

    rows = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for distribution, extra, _ in EXTRAS.values():
        assert any(row.split(">")[0] == distribution for row in rows.get(extra, [])), (distribution, extra)


def test_datasets_is_a_folder_and_not_a_package() -> None:
    assert not (ROOT / "datasets" / "__init__.py").exists(), "it would overwrite Hugging Face's package `datasets`"
