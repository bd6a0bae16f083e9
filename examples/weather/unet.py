"""A StormCast-style U-Net forecaster: an ordinary one-device module, with nothing about ranks or shards in it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Conv(nn.Module):
    """A 3 x 3 convolution that keeps the size, or halves it (rounding up) with `stride` 2.

    Longitude wraps around if `periodic`; elsewhere the field is continued by zeros.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, stride: int = 1, periodic: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.periodic = periodic
        padding = (1, 0 if periodic else 1)
        self.conv = nn.Conv2d(in_channels, out_channels, 3, stride, padding, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (1, 1, 0, 0), mode="circular") if self.periodic else x)


class Block(nn.Module):
    """Two normalised convolutions around which the input is carried."""

    def __init__(self, in_channels: int, out_channels: int, *, groups: int, dropout: float, periodic: bool) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels)
        self.conv1 = Conv(in_channels, out_channels, periodic=periodic, bias=False)  # the norm after it would undo one
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = Conv(out_channels, out_channels, periodic=periodic)
        self.carry = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(self.dropout(F.silu(self.norm2(y))))
        return self.carry(x) + y


class Attention(nn.Module):
    """Self-attention between all places of the map."""

    def __init__(self, channels: int, *, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)  # [B, H * W, C]
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed).transpose(1, 2).unflatten(2, x.shape[2:])


class ForecastUNet(nn.Module):
    """Maps inputs [B, in_channels, H, W] to a forecast [B, out_channels, H, W] of any H and W, in the inputs' units.

    The network predicts a change, which is added to the input channels `base` (by default the last `out_channels`
    ones): an untrained network forecasts persistence. Each entry of `multipliers` is a level of half the size of the
    one before it, with `width` times that many channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        width: int = 32,
        multipliers: Sequence[int] = (1, 2, 2),
        heads: int = 4,
        groups: int = 4,
        dropout: float = 0.0,
        periodic: bool = False,
        base: slice | None = None,
    ) -> None:
        super().__init__()
        self.base = slice(in_channels - out_channels, in_channels) if base is None else base
        if len(range(in_channels)[self.base]) != out_channels:
            raise ValueError(f"`base` {self.base} must pick {out_channels} of the {in_channels} input channels")
        channels = [width * multiplier for multiplier in multipliers]
        block = functools.partial(Block, groups=groups, dropout=dropout, periodic=periodic)
        self.first = Conv(in_channels, channels[0], periodic=periodic)
        self.down_blocks = nn.ModuleList(block(count, count) for count in channels[:-1])
        pairs = list(itertools.pairwise(channels))
        self.down = nn.ModuleList(Conv(above, below, stride=2, periodic=periodic) for above, below in pairs)
        self.middle = nn.Sequential(
            block(channels[-1], channels[-1]),
            Attention(channels[-1], heads=heads, groups=groups),
            block(channels[-1], channels[-1]),
        )
        self.up = nn.ModuleList(Conv(below, above, periodic=periodic) for above, below in reversed(pairs))
        self.up_blocks = nn.ModuleList(block(2 * above, above) for above, _ in reversed(pairs))
        self.last_norm = nn.GroupNorm(groups, channels[0])
        self.last = Conv(channels[0], out_channels, periodic=periodic)
        for weight in self.last.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        skips = []
        for block, down in zip(self.down_blocks, self.down, strict=True):
            y = block(y)
            skips.append(y)
            y = down(y)
        y = self.middle(y)
        for up, block in zip(self.up, self.up_blocks, strict=True):
            skip = skips.pop()
            y = up(F.interpolate(y, size=skip.shape[2:], mode="nearest"))
            y = block(torch.cat([y, skip], dim=1))
        return x[:, self.base] + self.last(F.silu(self.last_norm(y)))
