"""Train the U-Net forecaster on a store of gridded times: in one process, or with every sample split over ranks.

`python train.py --data weather.zarr` runs in one process; `torchrun --nproc-per-node 4 train.py --data weather.zarr
--domain 2` on 2 groups of 2 ranks, where a group shares a sample and every rank reads and holds only its rows.
Killed, the same command with --resume goes on where the last checkpoint was written.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpoint
import torch
import torch.distributed as dist
from evaluate import Score, change_scale, evaluate, group_mean, whole
from report import Agreement, Report, Usage, from_all_ranks, peak_memory
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from series import Series, look_at
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from unet import ForecastUNet

from shardsets import DomainDataLoader
from shardtensor import init_mesh, sync_module_over_mesh

COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("loss {task.fields[loss]:.4f}"),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="path or URL of a Zarr store, NetCDF, HDF5 or GRIB file")
    parser.add_argument("--variables", nargs="+", help="default: all that lie on the grid")
    parser.add_argument("--out", type=Path, default=Path("runs/weather"), help="for checkpoint and pictures")
    parser.add_argument("--domain", type=int, help="ranks that share one sample (default: all)")
    parser.add_argument("--lead", type=float, default=6.0, help="hours to forecast ahead")
    parser.add_argument("--input-steps", type=int, default=2, help="times that the model sees")
    parser.add_argument("--held-out", type=float, default=0.2, help="last part of the times, to judge by")
    parser.add_argument("--fill-nan", type=float, help="put this in place of missing values (default: an error)")
    parser.add_argument("--steps", type=int, default=240, help="training steps in all")
    parser.add_argument("--batch", type=int, default=4, help="samples a step, all ranks together")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--width", type=int, default=16, help="channels of the U-Net's first level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    parser.add_argument("--stop-after", type=int, help="save and leave after this step, before --steps are done")
    parser.add_argument("--compare", type=Path, help="the --out of the same training in one process, to compare with")
    return parser.parse_args()


def start_ranks(options: argparse.Namespace) -> DeviceMesh | None:
    """The mesh [data, domain]; None in one process, which then trains on plain tensors."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    domain = options.domain or world
    mesh = init_mesh((-1, domain), ("data", "domain"))
    if options.batch % mesh["data"].size():
        raise ValueError(f"--batch {options.batch} does not divide over {mesh['data'].size()} data groups")
    return mesh


def make_loader(
    options: argparse.Namespace, mesh: DeviceMesh | None, device: torch.device, series: Series, times: slice, **how: Any
) -> DomainDataLoader:
    """Samples of some of the times."""
    return DomainDataLoader(
        options.data,
        mesh,
        variables=[*series.changing, *series.fixed],
        time=times,
        input_steps=series.input_steps,
        lead=series.lead,
        batch_size=options.batch // (1 if mesh is None else mesh["data"].size()),
        seed=options.seed,
        device=device,
        transform=series.features,
        nan="raise" if options.fill_nan is None else options.fill_nan,
        **how,
    )


class Training:
    """A model, its optimizer and its samples, and how far the training is."""

    def __init__(self, options: argparse.Namespace, mesh: DeviceMesh | None) -> None:
        self.options, self.mesh = options, mesh
        self.chief = mesh is None or dist.get_rank() == 0
        cuda = torch.cuda.is_available() if mesh is None else mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.series = look_at(
            options.data,
            variables=options.variables,
            input_steps=options.input_steps,
            lead_hours=options.lead,
            held_out=options.held_out,
        )
        known = (options, mesh, self.device, self.series)
        self.loader = make_loader(*known, self.series.train, shuffle=True, statistics="compute")
        self.held_out = make_loader(*known, self.series.held_out, drop_last=False, statistics=self.loader.statistics)
        self.channels = self.loader.channels[: len(self.loader.channels) - len(self.series.fixed)]
        torch.manual_seed(options.seed)
        self.model = ForecastUNet(
            self.series.extra_channels + options.input_steps * len(self.channels),
            len(self.channels),
            width=options.width,
            periodic=self.series.periodic,
        ).to(self.device)
        self.net: nn.Module = self.model
        if mesh is not None:
            sync_module_over_mesh(self.model, mesh["domain"])
            if mesh["data"].size() > 1:
                self.net = DistributedDataParallel(self.model, process_group=mesh["data"].get_group())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.step = 0
        self.losses: list[float] = []
        self.agreement: Agreement | None = None
        saved = checkpoint.load(options.out) if options.resume else None
        if saved is not None:
            self.restore(saved)
        found = from_all_ranks(self.step)
        if len(set(found)) > 1:
            raise FileNotFoundError(
                f"the ranks found checkpoints of steps {found}: --out must be a folder all of them see"
            )
        if saved is None:
            first = itertools.islice(self.loader, 16)
            self.scale = change_scale(first, mesh)
            self.loader.set_epoch(0)
            self.before = evaluate(self.net, self.held_out, mesh)

    def _rate(self, step: int) -> float:
        """Warm up over 20 steps, then follow a cosine to zero."""
        return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.options.steps)))

    def state(self) -> dict[str, Any]:
        """All that going on needs; the same on every rank."""
        return {
            "step": self.step,
            "losses": self.losses,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "loader": self.loader.state_dict(),
            "scale": self.scale,
            "before": asdict(self.before),
            "agreement": None if self.agreement is None else asdict(self.agreement),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Stand where `state` was taken."""
        for name in ("model", "optimizer", "schedule", "loader"):
            getattr(self, name).load_state_dict(saved[name])
        self.step, self.losses, self.scale = saved["step"], saved["losses"], saved["scale"].to(self.device)
        self.before = Score(**saved["before"])
        self.agreement = None if saved["agreement"] is None else Agreement(**saved["agreement"])

    def run(self) -> None:
        """Train to the last step, or to --stop-after, saving checkpoints on the way."""
        options = self.options
        last = min(options.steps, options.stop_after or options.steps)
        reference = checkpoint.load(options.compare) if options.compare else None
        with Progress(*COLUMNS, disable=not self.chief) as progress:
            task = progress.add_task("training", total=options.steps, completed=self.step, loss=math.nan)
            while self.step < last:
                for batch in self.loader:
                    self.learn(batch)
                    progress.update(task, completed=self.step, loss=self.losses[-1])
                    if reference is not None and self.step == reference["step"]:
                        self.agreement = Agreement.of(self.model, self.losses, reference)
                    if self.chief and (self.step % options.save_every == 0 or self.step == last):
                        checkpoint.save(options.out, self.state())
                    if self.step == last:
                        break

    def learn(self, batch: dict[str, Any]) -> None:
        """One step. The loss is in units of the squared change over the lead, so that all channels weigh the same."""
        error = (self.net(batch["input"]) - batch["target"]) / self.scale
        loss = error.square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.losses.append(group_mean(whole(loss.detach()), self.mesh).item())
        if not math.isfinite(self.losses[-1]):
            raise FloatingPointError(f"the loss is {self.losses[-1]} at step {self.step}: lower --rate")

    def finish(self) -> None:
        """Evaluate, draw, and print the report."""
        before = copy.copy(self.held_out.stats)
        after = evaluate(self.net, self.held_out, self.mesh)
        read = self.held_out.stats
        needed, fetched = read.bytes_needed - before.bytes_needed, read.bytes_fetched - before.bytes_fetched
        usage = from_all_ranks(Usage(after.samples, needed, fetched, peak_memory(self.device)))
        held_out = (self.before.loss(self.scale), after.loss(self.scale))
        pictures = self.draw(held_out)
        if self.chief:
            report = Report(
                losses=self.losses,
                held_out=held_out,
                score=after,
                channels=self.channels,
                std=self.loader.statistics.std[: len(self.channels)],
                lead=self.series.lead_text,
                agreement=self.agreement,
                usage=usage,
                sample_bytes=self.series.sample_bytes,
                pictures=pictures,
            )
            report.write(self.options.out / "report.json")
            report.show()

    def draw(self, held_out: tuple[float, float]) -> list[Path]:
        """Draw the first held-out forecast and the losses; returns where. A collective."""
        batch = next(iter(self.held_out))
        with torch.no_grad():
            forecast = self.net(batch["input"])
        count = len(self.channels)
        fields = [whole(field[:1])[0] for field in (batch["input"][:, -count:], forecast, batch["target"])]
        if not self.chief:
            return []
        try:
            from pictures import draw_forecast, draw_losses
        except ModuleNotFoundError as error:
            print(f"No pictures: {error.name} is missing, which the extra `plot` brings.")
            return []
        statistics = self.loader.statistics
        mean, std = (torch.tensor(values[:count])[:, None, None] for values in (statistics.mean, statistics.std))
        last, guess, truth = (field.cpu() * std + mean for field in fields)
        paths = [self.options.out / "forecast.png", self.options.out / "loss.png"]
        title = f"{self.series.lead_text} ahead, from {batch['time'][0]}"
        draw_forecast(paths[0], self.channels, last, guess, truth, title)
        draw_losses(paths[1], self.losses, held_out)
        return paths


def main() -> None:
    options = read_options()
    training = Training(options, start_ranks(options))
    training.run()
    if training.step == options.steps:
        training.finish()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
