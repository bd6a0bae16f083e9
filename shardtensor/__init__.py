"""Sharded tensors for samples larger than one device: an unchanged ``nn.Module`` runs on uneven slabs, exactly."""

from importlib.metadata import version

from shardtensor import rules
from shardtensor.comm import CommTrace, comm_trace
from shardtensor.distribute import init_mesh, scatter_tensor, sync_module_over_mesh
from shardtensor.errors import (
    CollectiveError,
    LayoutError,
    MissingRuleError,
    OpError,
    RankDisagreementError,
    ShardTensorError,
)
from shardtensor.promotion import TensorPromotionMode
from shardtensor.registry import strict
from shardtensor.spec import Cut, Partial, Replicate, Shard, ShardTensorSpec
from shardtensor.tensor import ShardTensor

__all__ = [
    "CollectiveError",
    "CommTrace",
    "Cut",
    "LayoutError",
    "MissingRuleError",
    "OpError",
    "Partial",
    "RankDisagreementError",
    "Replicate",
    "Shard",
    "ShardTensor",
    "ShardTensorError",
    "ShardTensorSpec",
    "TensorPromotionMode",
    "comm_trace",
    "init_mesh",
    "rules",
    "scatter_tensor",
    "strict",
    "sync_module_over_mesh",
]

__version__ = version("shardtensor")
