"""The sharded tensor: a local block, the spec that places it, and the two lines that send ops to their rules."""

from __future__ import annotations

import copy as copy_module
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType

import torch
from torch.distributed.tensor import DTensor

from shardtensor import boundary, infer, promotion
from shardtensor.comm.trace import op_scope
from shardtensor.comm.trace import running as running_traces
from shardtensor.errors import LayoutError, OpError
from shardtensor.fallback import run_replicated
from shardtensor.promotion import SETTLED, TensorPromotionMode
from shardtensor.registry import FUNCTIONS, NAMED_FUNCTIONS, RULES, named_handler
from shardtensor.spec import Cut, DeviceMesh, Layout, Placement, ShardTensorSpec, TensorMeta, replicate

__all__ = ["ShardTensor", "wrap"]

_function_off = torch._C.DisableTorchFunctionSubclass


class ShardTensor(torch.Tensor):
    """One logical tensor, cut into blocks of any size over the ranks of a device mesh.

    It takes part in autograd, in ``nn.Module`` code and in optimizers as any tensor does; ``shape`` is the global
    shape. Make one with `from_local` or `scatter_tensor`.

    Attributes:
        _local_tensor: this rank's block.
        _spec: the layout, the same on every rank.
    """

    _local_tensor: torch.Tensor
    _spec: ShardTensorSpec
    _moved_view: str = ""  # when a view became a copy, as its rows had to move between ranks: see rules/aliasing.py
    _moved_views: tuple[ReferenceType[ShardTensor], ...] = ()  # views of this tensor that are copies
    __slots__ = ("_local_tensor", "_spec")

    @staticmethod
    def __new__(cls, local_tensor: torch.Tensor, spec: ShardTensorSpec, *, requires_grad: bool = False) -> ShardTensor:
        block = local_tensor.detach() if local_tensor.requires_grad else local_tensor
        tensor: ShardTensor = _documented_new(cls, block, spec)
        if requires_grad:
            tensor.requires_grad_()
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        spec = self._spec
        return (
            f"ShardTensor(local_tensor={self._local_tensor!r}, shape={tuple(spec.shape)}, mesh={spec.mesh}, "
            f"placements={spec.placements})"
        )

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec) if self._spec.shape else format(self.item(), format_spec)

    def backward(
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """As ``torch.Tensor.backward``, without the detour by which torch finds this class."""
        arguments = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        FUNCTIONS[torch.autograd.backward](torch.autograd.backward, (), (self, gradient), arguments)

    # Making and leaving ------------------------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: str | dict[int, Sequence[Sequence[int]]] = "infer",
        global_shape: Sequence[int] | None = None,
    ) -> ShardTensor:
        """Make a sharded tensor of the blocks that the ranks hold.

        Args:
            local_tensor: this rank's block; gradients flow back to it.
            device_mesh: the ranks; default: the mesh of the surrounding ``with mesh:``.
            placements: one per mesh axis; default: ``Replicate()`` on all.
            sharding_shapes: "infer" asks all ranks for their shapes and checks that they agree; "chunk" computes the
                sizes that ``torch.chunk`` gives for ``global_shape``, without communication; a dict maps mesh axes to
                the local shapes of all their ranks, and the ranks check that they gave the same.
            global_shape: shape of the whole tensor, needed by "chunk".

        Raises:
            LayoutError: the block does not fit what was said of it.
            RankDisagreementError: the ranks' shapes, dtypes or sizes do not go together.
        """
        mesh = infer.current_mesh() if device_mesh is None else device_mesh
        spec = infer.infer_spec(local_tensor, mesh, placements, sharding_shapes, global_shape)
        if local_tensor.device.type != mesh.device_type and not local_tensor.is_meta:
            local_tensor = local_tensor.to(mesh.device_type)
        result: ShardTensor = boundary.FromLocal.apply(infer.in_memory_order(local_tensor, spec), spec)
        return result

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's block, differentiable.

        Args:
            grad_placements: placements that the gradients of the blocks will have, where they differ from the
                tensor's own; ``Partial`` says that each rank's gradient is a contribution still to be summed.
        """
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._local_tensor
        layout = None if grad_placements is None else infer.layout_like(self._spec, grad_placements)
        result: torch.Tensor = boundary.ToLocal.apply(self, layout)
        return result

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, gathered on every rank, differentiable."""
        whole = self._with_layout(replicate(len(self._spec.layout)))
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        sizes: dict[int, Sequence[int]] | None = None,
        async_op: bool = False,
    ) -> ShardTensor:
        """The same tensor under other placements or other shard sizes, differentiable.

        Args:
            device_mesh: must be the tensor's own mesh.
            placements: one per mesh axis.
            sizes: rows per rank along a mesh axis that cuts: ``{axis: (5, 9, 2)}``. Default: the sizes the tensor has
                where the placement does not change, else those of ``torch.chunk``.
            async_op: accepted for compatibility; the exchange is complete when this returns.

        Raises:
            LayoutError: no placements, ``Partial`` among them, another mesh, or sizes that do not fit.
        """
        if device_mesh is not None and device_mesh != self._spec.mesh:
            raise LayoutError(f"redistribute keeps the mesh: got {device_mesh}, the tensor lives on {self._spec.mesh}")
        if placements is None:
            if sizes is None:
                raise LayoutError("redistribute needs placements, one per mesh axis, or sizes")
            placements = self._spec.placements
        if any(placement.is_partial() for placement in placements):
            raise LayoutError("cannot redistribute to Partial: ask for Replicate() or Shard(dim)")
        return self._with_layout(infer.layout_like(self._spec, placements, sizes))

    def _with_layout(self, layout: Layout) -> ShardTensor:
        if layout == self._spec.layout:
            return self
        result: ShardTensor
        if torch.is_grad_enabled() and self.requires_grad:
            result = boundary.Redistribute.apply(self, layout)
        else:  # the way of gradients: shorter
            result = boundary.moved_to(self, layout)
        return result

    @classmethod
    def from_dtensor(cls, dtensor: DTensor) -> ShardTensor:
        """The same tensor as a ShardTensor, without communication, differentiable."""
        result: ShardTensor = boundary.FromDTensor.apply(dtensor)
        return result

    def to_dtensor(self) -> DTensor:
        """The same tensor as a DTensor, differentiable; shards of other sizes than ``torch.chunk``'s move to those."""
        even = self._with_layout(infer.layout_like(self._spec, self._spec.placements, chunked=True))
        result: DTensor = boundary.ToDTensor.apply(even)
        return result

    def offsets(self, mesh_dim: int | None = None) -> list[int] | int:
        """Where this rank's block starts in the whole tensor, per mesh axis (0 where the axis does not cut)."""
        found = self._spec.offsets(mesh_dim)
        return found if isinstance(found, int) else list(found)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks that share this tensor."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """torch's placements, one per mesh axis."""
        return self._spec.placements

    # Promotion of plain tensors ----------------------------------------------------------------------------------

    @classmethod
    def get_promotion_mode(cls) -> TensorPromotionMode:
        """What happens to a plain tensor that meets a sharded one."""
        return promotion.get_mode()

    @classmethod
    def set_promotion_mode(cls, mode: TensorPromotionMode | str) -> None:
        """Set what happens to a plain tensor that meets a sharded one: "silent" (default), "warn" or "disabled"."""
        promotion.set_mode(TensorPromotionMode(mode))

    @classmethod
    @contextmanager
    def promotion_mode(cls, mode: TensorPromotionMode | str) -> Iterator[None]:
        """Set the promotion mode inside the block."""
        before = promotion.get_mode()
        cls.set_promotion_mode(mode)
        try:
            yield
        finally:
            promotion.set_mode(before)

    # The caller's own rules --------------------------------------------------------------------------------------

    @classmethod
    def register_function_handler(cls, func: Callable[..., Any], handler: Callable[..., Any]) -> None:
        """Call ``handler(func, types, args, kwargs)`` instead of the Python function ``func`` on sharded tensors.

        Plain tensors among the arguments arrive as replicated ShardTensors.
        """
        FUNCTIONS[func] = promotion.with_promoted_arguments(handler)

    @classmethod
    def register_named_function_handler(cls, func_name: str, handler: Callable[..., Any]) -> None:
        """Like `register_function_handler`, for ops made with ``torch.library``: "library.op.default"."""
        NAMED_FUNCTIONS[func_name] = promotion.with_promoted_arguments(handler)

    @classmethod
    def register_dispatch_handler(cls, op: torch._ops.OpOverload, handler: Callable[..., Any]) -> None:
        """Call ``handler(*args, **kwargs)`` for an aten op, below autograd, instead of the op table's rule."""
        RULES[op] = handler

    # Dispatch ----------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = FUNCTIONS.get(func)
        if handler is None and NAMED_FUNCTIONS:
            handler = named_handler(func)
        if handler is not None:
            return handler(func, types, args, kwargs or {})
        for arg in (*args, *kwargs.values()) if kwargs else args:
            kind = type(arg)
            if kind in SETTLED or (kind in (tuple, list) and SETTLED.issuperset(map(type, arg))):
                continue
            args, kwargs = promotion.promoted(func, args, kwargs)
            break
        with _function_off():
            return func(*args, **kwargs) if kwargs else func(*args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves out the class
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = RULES.get(func) or partial(run_replicated, func)
        if torch.is_inference_mode_enabled() and func.is_view and not args[0].is_inference():
            rule = partial(_outside_inference, rule)
        if args and isinstance(args[0], ShardTensor) and (args[0]._moved_view or args[0]._spec.partial_axes):
            rule = partial(_of_a_copy, rule) if func.is_view and func in RULES else rule
        try:
            if running_traces:
                with op_scope(str(func)):
                    return rule(*args, **(kwargs or {}))
            return rule(*args, **kwargs) if kwargs else rule(*args)
        except (TypeError, NotImplementedError) as error:
            # Python's operators swallow these two and report "unsupported operand type(s)" instead.
            raise OpError(f"{func}: {type(error).__name__}: {error}") from error

    # Copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if id(self) in memo:
            found: ShardTensor = memo[id(self)]
            return found
        if not self.is_leaf:
            raise OpError("only leaf tensors can be deep-copied, as with plain tensors: detach() first")
        copy = _rebuild(self._local_tensor.detach().clone(), self._spec, self.requires_grad, self._is_parameter())
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = copy_module.deepcopy(self.grad, memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._local_tensor.detach(), self._spec, self.requires_grad, self._is_parameter())

    def _is_parameter(self) -> bool:
        return isinstance(self, torch.nn.Parameter)

    def __tensor_flatten__(self) -> tuple[list[str], ShardTensorSpec]:
        return ["_local_tensor"], self._spec

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], spec: ShardTensorSpec, outer_size: Any, outer_stride: Any
    ) -> ShardTensor:
        meta = TensorMeta(torch.Size(outer_size), tuple(outer_stride), spec.dtype)
        return ShardTensor(inner["_local_tensor"], ShardTensorSpec(spec.mesh, spec.layout, meta))

    def __coerce_tangent_metadata__(self) -> ShardTensor:
        """What a compiled backward is traced with as the gradient of this output: no pending sum."""
        return self._with_layout(self._spec.resolved_layout)

    def __coerce_same_metadata_as_tangent__(
        self, metadata: ShardTensorSpec, expected_type: type | None = None
    ) -> torch.Tensor | None:
        """This gradient as the compiled backward was traced for; None: it cannot be."""
        if expected_type is torch.Tensor:
            return self.full_tensor()
        return self._with_layout(metadata.layout) if expected_type in (None, ShardTensor) else None


def _rebuild(local_tensor: torch.Tensor, spec: ShardTensorSpec, requires_grad: bool, is_parameter: bool) -> ShardTensor:
    tensor = ShardTensor(local_tensor, spec, requires_grad=requires_grad)
    if is_parameter:
        tensor._is_param = True  # how torch marks a Parameter of another class
    return tensor


torch.serialization.add_safe_globals([_rebuild, ShardTensorSpec, TensorMeta, Cut])
SETTLED.add(ShardTensor)


def _outside_inference(rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Under ``inference_mode``, torch takes a view of a normal tensor for a normal tensor: it must be one."""
    with torch.inference_mode(False), torch.no_grad():
        return rule(*args, **kwargs)


def _of_a_copy(rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A view of a view that is a copy reaches the tensor that both show no more than that view does; and a tensor with
    a pending sum gets another block when it is written in place, so that views of it no longer show it."""
    from shardtensor.rules.aliasing import moved  # rules import this file

    result = rule(*args, **kwargs)
    for view in result if isinstance(result, list | tuple) else (result,):
        mark = args[0]._moved_view or view._moved_view
        moved(view, args[0])._moved_view = mark
    return result


def _documented_new(
    cls: type[ShardTensor], local_tensor: torch.Tensor, spec: ShardTensorSpec, *, requires_grad: bool = False
) -> ShardTensor:
    meta = spec.tensor_meta
    tensor: ShardTensor = torch.Tensor._make_wrapper_subclass(
        cls, meta.shape, meta.stride, dtype=local_tensor.dtype, device=local_tensor.device, requires_grad=requires_grad
    )
    tensor._local_tensor = local_tensor
    tensor._spec = spec
    return tensor


def _fastest_new() -> Callable[..., ShardTensor]:
    """DTensor's own constructor, 1 us faster, where this torch has it and it serves other classes; else ours."""
    try:
        local, meta = torch.empty(2), TensorMeta(torch.Size([4]), (1,), torch.float32)
        facts: Any = SimpleNamespace(tensor_meta=meta)
        found: Callable[..., ShardTensor] = torch.Tensor._dtensor__new__
        made = found(ShardTensor, local, facts, requires_grad=False)
        serves = type(made) is ShardTensor and made._local_tensor is local and made._spec is facts
    except (AttributeError, TypeError, RuntimeError):
        return _documented_new
    return found if serves and made.shape == meta.shape else _documented_new


_new = _fastest_new()


def wrap(local_tensor: torch.Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """A sharded tensor of a block and its spec, outside autograd: what rules return.

    The spec's dtype follows the block's.
    """
    if local_tensor.dtype != spec.tensor_meta.dtype:
        spec = spec.with_dtype(local_tensor.dtype)
    return _new(ShardTensor, local_tensor, spec, requires_grad=False)
