"""The quantised weight: once per version, never stale."""

import copy
import io

import pytest
import torch

from jetrl_megatron import JETRL_FP8, quantize_weight
from jetrl_megatron.layers.weight import VersionedParameter, WeightCache
from jetrl_megatron.ops import LinearOperand


class CountingCache(WeightCache):
    def __init__(self) -> None:
        self.calls = 0
        super().__init__(self._count)

    def _count(self, weight: torch.Tensor) -> LinearOperand:
        self.calls += 1
        return LinearOperand(quantize_weight(weight, JETRL_FP8))


@pytest.fixture
def weight() -> VersionedParameter:
    return VersionedParameter(torch.ones(128, 128, dtype=torch.bfloat16))


def assert_current(cache: CountingCache, weight: torch.Tensor) -> None:
    assert cache.get(weight).tensor.equal(quantize_weight(weight, JETRL_FP8))


def test_cache_quantises_once_per_version(weight):
    cache = CountingCache()
    operands = {id(cache.get(weight)) for _ in range(5)}
    assert cache.calls == 1 and len(operands) == 1
    with torch.no_grad():
        weight.add_(1)
    assert_current(cache, weight)
    cache.get(weight)
    assert cache.calls == 2


def test_cache_sees_write_through_data(weight):
    cache = CountingCache()
    before = cache.get(weight).tensor.scale.item()
    weight.data.mul_(2)
    assert cache.get(weight).tensor.scale.item() == 2 * before


def test_cache_sees_write_through_old_alias_and_its_views(weight):
    alias = weight.data
    view = weight.data.view(-1)[:5]
    cache = CountingCache()
    assert_current(cache, weight)
    alias.mul_(2)
    assert_current(cache, weight)
    view.fill_(100)
    assert_current(cache, weight)
    weight.detach().zero_()
    assert_current(cache, weight)


def test_cache_sees_writes_to_the_buffer_behind(weight):
    cache = CountingCache()
    assert_current(cache, weight)
    buffer = torch.full((4, 128, 128), 3.0, dtype=torch.bfloat16)
    weight.data = buffer[1]
    assert_current(cache, weight)
    buffer.mul_(5)
    assert cache.get(weight).tensor.dequantize()[0, 0] == 15
    calls = cache.calls
    cache.get(weight)
    assert cache.calls == calls


def test_cache_sees_load_state_dict_and_assignment():
    layer = torch.nn.Linear(128, 128, bias=False)
    layer.weight = VersionedParameter(layer.weight.detach().clone())
    cache = CountingCache()
    cache.get(layer.weight)
    layer.load_state_dict({"weight": torch.randn(128, 128)})
    assert_current(cache, layer.weight)
    layer.weight.data = torch.randn(128, 128)
    assert_current(cache, layer.weight)
    layer.to(torch.bfloat16)
    assert_current(cache, layer.weight)
    assert cache.calls == 4


def test_cache_sees_optimizer_step():
    weight = VersionedParameter(torch.randn(128, 128))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    cache = CountingCache()
    cache.get(weight)
    weight.grad = torch.randn(128, 128)
    optimizer.step()
    assert_current(cache, weight)
    assert cache.calls == 2


def test_cache_refresh_quantises_without_a_visible_write(weight):
    cache = CountingCache()
    cache.get(weight)
    cache.get(weight, refresh=True)
    assert cache.calls == 2


def test_cache_never_keeps_an_unversioned_weight():
    weight = torch.nn.Parameter(torch.ones(128, 128))
    cache = CountingCache()
    cache.get(weight)
    weight.data.mul_(2)
    assert_current(cache, weight)
    cache.get(weight)
    assert cache.calls == 3


def test_cache_tells_weights_apart(weight):
    cache = CountingCache()
    other = VersionedParameter(torch.full((128, 128), 7.0, dtype=torch.bfloat16))
    assert_current(cache, weight)
    assert_current(cache, other)
    assert_current(cache, weight)


def test_versioned_parameter_behaves_as_a_parameter(weight):
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    assert isinstance(copy.deepcopy(weight), VersionedParameter)
    assert weight.data.data_ptr() == weight.data_ptr() and not weight.data.requires_grad
    buffer = io.BytesIO()
    torch.save({"weight": weight.detach()}, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer)["weight"], weight.detach())
    (weight.float().sum() * 2).backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2))
