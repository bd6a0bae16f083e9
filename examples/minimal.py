"""The smallest whole program: a store, an ordinary model, one pass over the data; any number of ranks.

`python minimal.py weather.zarr` runs in one process, `torchrun --nproc-per-node 3 minimal.py weather.zarr` on three.
"""

import sys

import torch
from torch import nn, optim

from shardsets import DomainDataLoader
from shardtensor import init_mesh, sync_module_over_mesh

torch.manual_seed(0)
mesh = init_mesh((1, -1), ("data", "domain"))
loader = DomainDataLoader(sys.argv[1], mesh, batch_size=2, statistics="compute")
channels = len(loader.channels)
model = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, channels, 3, padding=1))
sync_module_over_mesh(model.to(mesh.device_type), mesh["domain"])
optimizer = optim.AdamW(model.parameters(), lr=3e-3)
for step, batch in enumerate(loader):
    loss = nn.functional.mse_loss(model(batch["input"]), batch["target"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.item()  # on every rank, or the ranks would wait for each other
    if mesh.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}: loss {value:.4f}, rows here {batch['input'].to_local().shape[2]}")
