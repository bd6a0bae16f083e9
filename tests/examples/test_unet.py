"""The forecaster takes maps of any size, starts as persistence, and all its weights learn."""

import pytest
import torch
from unet import ForecastUNet


def moved(model: ForecastUNet) -> ForecastUNet:
    """With a last layer that is not zero, as after training."""
    torch.nn.init.normal_(model.last.conv.weight, std=0.1)
    return model


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (19, 24), (33, 49), (5, 6)])
@pytest.mark.parametrize("periodic", [False, True])
def test_any_size(size: tuple[int, int], periodic: bool) -> None:
    torch.manual_seed(0)
    model = moved(ForecastUNet(5, 2, width=8, groups=4, heads=2, periodic=periodic))
    assert model(torch.randn(2, 5, *size)).shape == (2, 2, *size)


def test_untrained_it_forecasts_persistence() -> None:
    x = torch.randn(2, 7, 9, 12)
    assert torch.equal(ForecastUNet(7, 3, width=8, groups=4)(x), x[:, -3:])
    assert torch.equal(ForecastUNet(7, 3, width=8, groups=4, base=slice(0, 3))(x), x[:, :3])


def test_every_weight_gets_a_gradient() -> None:
    torch.manual_seed(0)
    model = moved(ForecastUNet(5, 2, width=8, groups=4, heads=2))
    model(torch.randn(2, 5, 11, 13)).square().mean().backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not without


def test_a_periodic_map_has_no_seam() -> None:
    torch.manual_seed(0)
    model = moved(ForecastUNet(3, 1, width=8, groups=4, heads=2, periodic=True)).double()
    x = torch.randn(1, 3, 9, 16, dtype=torch.float64)
    shifted = model(x.roll(4, dims=3)).roll(-4, dims=3)  # by what the two strided levels can express
    torch.testing.assert_close(shifted, model(x), rtol=1e-10, atol=1e-10)


def test_a_base_of_another_size_is_told() -> None:
    with pytest.raises(ValueError, match="must pick 2 of the 4"):
        ForecastUNet(4, 2, base=slice(0, 3))
