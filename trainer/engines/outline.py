"""A model as its modules and shapes, without memory for its parameters; and a pass through it.

Owns what a sharded strategy, and a pipeline, know of the whole model: a rank may have no room for
it, and a standby has no use.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

STD = 0.02  # of what stands in for weights: a pass through it ends in finite numbers


def outlined(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes, with parameters on the meta device and all else as it is.

    Initial weights are then not even drawn.  What else is drawn at random would come out otherwise
    without them, and some models read their weights: these are built whole, and let go of it."""
    with contextlib.suppress(RuntimeError, TypeError, ValueError):  # those say it once more below
        with _without_memory():
            model = build()
        drawn = torch.get_rng_state()
        torch.manual_seed(torch.initial_seed())  # as `build` began
        if torch.equal(drawn, torch.get_rng_state()) and not _holds_meta(model):
            return model
    return _with_parameters(build(), _hollow)


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """A parameter is on the meta device from when the first module takes it, for whoever holds it:
    its shape stays, and whoever reads a value fails or gets a tensor on meta."""
    register = nn.Module.register_parameter

    def hollowed(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if type(parameter) is nn.Parameter and not parameter.is_meta:
            torch.utils.swap_tensors(parameter, _hollow(parameter))

    nn.Module.register_parameter = hollowed  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _holds_meta(model: nn.Module) -> bool:
    """Whether something was computed of weights: a buffer or an attribute that is on meta."""
    held = (one for module in model.modules()
            for one in (*module._buffers.values(), *vars(module).values()))
    return any(isinstance(one, Tensor) and one.is_meta for one in held)


def _hollow(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)


def _with_parameters(
    model: nn.Module, made: Callable[[nn.Parameter], nn.Parameter]
) -> nn.Module:
    """The same modules with other parameters, shared ones still shared."""
    return copy.deepcopy(model, {id(one): made(one) for one in model.parameters()})


def kept_for_backward(outline: nn.Module, batch: Mapping[str, Tensor], device: torch.device) -> int:
    """Bytes that one forward pass keeps for its backward pass, each storage counted once.

    The pass is a real one, so that it warms the kernels too.  All parameters are one memory, the
    largest one's, and their gradients are dropped one by one: their values mean nothing here."""
    most = dict[torch.dtype, int]()
    for one in outline.parameters():
        most[one.dtype] = max(most.get(one.dtype, 0), one.numel())
    rooms = {dtype: torch.randn(numbers).mul_(STD).to(device, dtype)
             for dtype, numbers in most.items()}

    def in_room(parameter: nn.Parameter) -> nn.Parameter:
        room = rooms[parameter.dtype][: parameter.numel()].view(parameter.shape)
        stand_in = nn.Parameter(room, parameter.requires_grad)
        if parameter.requires_grad:
            stand_in.register_post_accumulate_grad_hook(_drop)
        return stand_in

    model = _with_parameters(outline, in_room).to(device)
    parameters = {room.untyped_storage().data_ptr() for room in rooms.values()}
    kept = dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(dict(batch))
    loss.backward()
    return sum(kept.values())


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def hollow(parameters: Iterable[nn.Parameter]) -> None:
    """Lets go of their memory; shapes stay.  Nobody may read them before `fill`, or before they
    are given other data.  What they were a view of is left as it is."""
    for one in parameters:
        one.data = torch.empty_like(one.data)
        one.data.untyped_storage().resize_(0)


def fill(parameters: Iterable[nn.Parameter]) -> None:
    """Gives memory to those that have none, of no certain content."""
    for one in parameters:
        if one.numel() and not one.untyped_storage().nbytes():
            one.data.untyped_storage().resize_(one.numel() * one.element_size())
