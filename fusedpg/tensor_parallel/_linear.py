"""`nn.Linear` whose weight is spread over a group, by columns or by rows of the matrix product.

Parameters are DTensors as torch's styles make them, so state dicts, optimizers and checkpoints take
one for the other. Forward and backward work on the local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fusedpg._refusal import shared_errors, tell, telling
from fusedpg.tensor_parallel._blocks import Blocks, checked, dimension
from fusedpg.tensor_parallel._epilogue import Epilogue, Place, added
from fusedpg.tensor_parallel._sequence import Columns, Rows, columns, normed, summed_rows

_Linear = TypeVar("_Linear", bound="ParallelLinear")

_ELSEWHERE = object()  # a bias that a parametrization has in another place
_OPTIONS = dist.AllreduceOptions()
_OPTIONS.asyncOp = False


class ParallelLinear(nn.Linear):
    """The common part of both layers."""

    _title = ""
    _weight: Placement
    _bias: Placement
    _input: Placement
    _split = ""  # the argument that the ranks divide
    sequence_dim: int | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        pg = dist.distributed_c10d._get_default_group() if group is None else group
        self._distribute(_mesh(pg, self.weight.device.type), 0)

    def _set(self, *args: Any, **kwargs: Any) -> None:
        """The arguments that nn.Linear does not have, and their defaults."""
        raise NotImplementedError

    def _distribute(
        self, mesh: DeviceMesh, src_data_rank: int | None, copies: bool = False
    ) -> None:
        """Replaces the whole parameters by DTensors; all ranks of the mesh call it.

        Args:
            copies: the whole parameters stay somebody else's: neither their memory is taken nor
                are they overwritten by those of the source rank.
        """
        if mesh.ndim != 1:
            raise ValueError(
                f"{self._title}: a mesh of one dimension, got {mesh}: take one by its name, like "
                'mesh["tp"]'
            )
        features = getattr(self, self._split)
        spreads = src_data_rank is not None  # the others wait for this rank's parameters
        with telling(mesh.get_group(), self.weight, when=lambda: spreads):
            if features % mesh.size():
                best = -(-features // mesh.size()) * mesh.size()
                raise ValueError(
                    f"{self._title}: {self._split}={features} is not divisible by {mesh.size()} "
                    f"ranks: pad it to {best}, or take torch.distributed.tensor.parallel's style, "
                    "which allows uneven shards"
                )
        for name, placement in (("weight", self._weight), ("bias", self._bias)):
            whole = getattr(self, name)
            if whole is not None:
                given = whole
                if copies and isinstance(placement, Replicate):
                    given = whole.detach().clone()  # it is broadcast in place
                spread = distribute_tensor(given, mesh, [placement], src_data_rank=src_data_rank)
                part = spread.to_local()
                if (
                    copies
                    and part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                ):
                    # A part of the whole, of one rank or without a source rank.
                    own = part.detach().clone()
                    spread = DTensor.from_local(
                        own, mesh, [placement], run_check=False, shape=whole.shape,
                        stride=whole.stride(),
                    )  # fmt: skip
                parameter = nn.Parameter(spread, requires_grad=whole.requires_grad)
                self.register_parameter(name, parameter)
        self._mesh = mesh
        self._where: Place | None = None

    @classmethod
    def from_linear(
        cls: type[_Linear],
        linear: nn.Linear,
        *args: object,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        src_data_rank: int | None = 0,
        **kwargs: object,
    ) -> _Linear:
        """The layer with the whole weights of a Linear, which stays as it is: nothing is shared.

        Args:
            group: or a mesh of one dimension.
            src_data_rank: the rank whose weights count; None: each takes its share of its own.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._adopt(linear)
        layer._set(*args, **kwargs)
        pg = dist.distributed_c10d._get_default_group() if group is None else group
        mesh = pg if isinstance(pg, DeviceMesh) else _mesh(pg, linear.weight.device.type)
        layer._distribute(mesh, src_data_rank, copies=True)
        return layer

    def _adopt(self, linear: nn.Linear) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)  # also where it is None
        self.train(linear.training)

    def __getstate__(self) -> dict[str, object]:
        # A process group can be neither copied nor pickled; the mesh knows it.
        return {**self.__dict__, "_where": None}

    @property
    def _place(self) -> Place:
        if self._where is None:
            self._where = Place(self._mesh.get_group())
        return self._where

    def _uncompiled(self, *args: object, **kwargs: object) -> Any:
        """`forward`, which torch.compile cannot trace."""
        from fusedpg.tensor_parallel._uncompiled import uncompiled

        return uncompiled(self.forward, *args, **kwargs)

    def _dim(self, input: torch.Tensor) -> int:
        """The dimension of which each rank has a part."""
        assert self.sequence_dim is not None
        return dimension(self._title, self.sequence_dim, input.shape)

    def _local(
        self, input: torch.Tensor, placement: Placement
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """This rank's input, weight and bias, in the types that they are multiplied in."""
        if type(input) is not torch.Tensor and isinstance(input, DTensor):
            input = input.redistribute(placements=[placement]).to_local()
        weight = _local_part(self.weight)
        bias = None if self.bias is None else _local_part(self.bias)
        if input.shape[-1] != weight.shape[1]:
            raise ValueError(self._unfit(input, weight))
        if torch.is_autocast_enabled(input.device.type):
            input, weight = _autocast(input), _autocast(weight)
            bias = None if bias is None else _autocast(bias)
        return input, weight, bias

    def _unfit(self, input: torch.Tensor, weight: torch.Tensor) -> str:
        return (
            f"{self._title}: the input has {input.shape[-1]} features, in_features is "
            f"{weight.shape[1]}"
        )


class ColumnParallelLinear(ParallelLinear):
    """A Linear of which each rank computes a block of the output's features.

    The input is alike on all ranks; the output is this rank's `out_features / world_size` features.
    In backward the gradient of the input is summed over the ranks while that of the weight is
    computed. With `sequence_dim` the input is this rank's part of that dimension: parts are
    gathered while the own one is multiplied, and the gradient is that of this rank's part.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`: of the whole layer.
        activation: what is applied to the output, like `F.gelu`.
        sequence_dim: the dimension of which the input is this rank's part; None: it is whole.
        overlap: whether the own part is multiplied while the others arrive; None: where each rank
            has a core to spare.
        group: its ranks share the layer; default: all. Making the layer is a collective: weights
            are those of its first rank.
    """

    _title, _split = "ColumnParallelLinear", "out_features"
    _weight, _bias, _input = Shard(0), Shard(0), Replicate()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
        sequence_dim: int | None = None,
        overlap: bool | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, group=group)
        self._set(activation=activation, sequence_dim=sequence_dim, overlap=overlap)

    def _set(
        self,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
        sequence_dim: int | None = None,
        overlap: bool | None = None,
    ) -> None:
        self.activation = activation
        self.sequence_dim = checked(sequence_dim)
        self.overlap = overlap

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """This rank's features of the output."""
        if is_dynamo_compiling():
            return self._uncompiled(input)
        y = None
        weight: Any = self._parameters.get("weight")
        bias: Any = self._parameters.get("bias", _ELSEWHERE)
        if (
            type(input) is torch.Tensor
            and type(weight) is DTensor
            and (bias is None or type(bias) is DTensor)
            and self.sequence_dim is None
            and not torch.is_grad_enabled()
        ):
            # Frames of Python and self.weight's lookup would take longer than a token's product.
            with_bias = None if bias is None else bias._local_tensor
            try:
                y = F.linear(input, weight._local_tensor, with_bias)
            except RuntimeError:
                y = None  # `_product` says what is wrong
        if y is None:
            y = self._product(input)
        return y if self.activation is None else self.activation(y)

    def _product(self, input: torch.Tensor) -> torch.Tensor:
        """`forward` without the activation."""
        if self.sequence_dim is not None:
            with telling(self._mesh.get_group(), input):
                return self._gathered(input, self._dim(input))
        x, weight, bias = self._local(input, self._input)
        if torch.is_grad_enabled() and x.requires_grad:
            y: torch.Tensor = Columns.apply(x, weight, bias, self._place, self.overlap, None)
            return y
        return F.linear(x, weight, bias)

    def _gathered(self, input: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's features of all ranks' rows."""
        x, weight, bias = self._local(input, Shard(dim))
        place = self._place
        whole = [*x.shape[:-1], weight.shape[0]]
        whole[dim] *= place.size
        blocks = Blocks.of(whole[:-1], dim, place.size)
        tensors = (x.reshape(-1, x.shape[-1]), weight, bias)
        function = Columns.apply if _wants_gradients(tensors) else columns
        y: torch.Tensor = function(*tensors, place, self.overlap, blocks)
        return y.view(whole)

    def extra_repr(self) -> str:
        return super().extra_repr() + _described(self)


class RowParallelLinear(ParallelLinear):
    """A Linear of which each rank has a block of the input's features.

    The ranks' products are summed, and bias, dropout and residual follow:
    `residual + dropout(all_reduce(input @ weight.T) + bias)`, alike on all ranks. With dropout, on
    a CPU group of the backend "fused", that is one operation by generated code. With
    `sequence_dim` that, the residual and the norm are of this rank's part of that dimension, and it
    is a reduce_scatter.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`: of the whole layer.
        dropout: the probability, while training.
        norm: a module, like `nn.RMSNorm`, applied to the sum; then `forward` returns both. With
            `sequence_dim` the gradients of its parameters are summed over the ranks in backward.
        overlap: whether rows are summed while other rows are multiplied; None: where there are
            enough of them, and each rank has a core to spare or the group spans hosts.
        sequence_dim: the dimension of which the output is this rank's part; None: it is whole.
        group: its ranks share the layer; default: all. Making the layer is a collective: weights
            are those of its first rank.
    """

    _title, _split = "RowParallelLinear", "in_features"
    _weight, _bias, _input = Shard(1), Replicate(), Shard(-1)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        overlap: bool | None = None,
        sequence_dim: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, group=group)
        self._set(dropout=dropout, norm=norm, overlap=overlap, sequence_dim=sequence_dim)

    def _set(
        self,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        overlap: bool | None = None,
        sequence_dim: int | None = None,
    ) -> None:
        if not 0 <= dropout <= 1:
            raise ValueError(f"{self._title}: dropout is a probability, got {dropout}")
        self.dropout = dropout
        self.norm = norm
        self.overlap = overlap
        self.sequence_dim = checked(sequence_dim)

    def _unfit(self, input: torch.Tensor, weight: torch.Tensor) -> str:
        return (
            f"{self._title}: the input has {input.shape[-1]} features, and this rank multiplies "
            f"{weight.shape[1]} of {self.in_features}: a ColumnParallelLinear gives them, or "
            "input.chunk(world_size, -1)[rank]"
        )

    def forward(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        seed: int | None = None,
    ) -> Any:
        """The output, alike on all ranks or this rank's part; with a norm: (norm(output), output).

        Args:
            input: this rank's features.
            residual: is added; of the output's shape, and alike on all ranks where that is.
            seed: of the dropout, alike on all ranks; None: drawn from torch's default generator,
                so seed that alike on all ranks.
        """
        if is_dynamo_compiling():
            return self._uncompiled(input, residual, seed=seed)
        y = dim = None
        place = self._where
        weight: Any = self._parameters.get("weight")
        bias: Any = self._parameters.get("bias", _ELSEWHERE)
        if (
            place is not None
            and place.straight is not None
            and type(input) is torch.Tensor
            and type(weight) is DTensor
            and not weight.dtype.is_complex  # torch sends those as real numbers
            and (bias is None or (type(bias) is DTensor and bias.dtype is weight.dtype))
            and (residual is None or (type(residual) is torch.Tensor and residual.is_cpu))
            and self.sequence_dim is None
            and not (self.dropout and self.training)
            and not torch.is_grad_enabled()
            and not torch._C._len_torch_dispatch_stack()  # else they watch the sum, too
            # Under autocast `_summed` knows the size of a product; all ranks ask for `spare` there.
            and ("spare" in place.__dict__ or not torch.is_autocast_enabled("cpu"))
            and input.is_cpu
            and input.dim() > 1
            and input.is_contiguous()
            and place.chunks(input, weight._local_tensor, self.overlap) == 1
        ):
            # Few frames of Python: a token is multiplied in the time of some tens. These have the
            # bits of `_summed`.
            try:
                y = F.linear(input, weight._local_tensor)
            except RuntimeError:
                y = None  # `_summed` says what is wrong, and tells the others
            if y is not None and residual is not None and residual.shape != y.shape:
                y = None
            if y is not None:
                work = place.straight.allreduce([y], _OPTIONS)  # dist.all_reduce without its checks
                if work is not None:
                    work.wait()
                if bias is not None:
                    bias = bias._local_tensor
                    y.add_(bias if bias.dtype is y.dtype else bias.to(y.dtype))  # by autocast
                y = added(y, residual)
        if y is None:
            before = shared_errors()
            try:
                y, dim = self._summed(input, residual, seed)
            except Exception as error:
                tell(self._mesh.get_group(), error, before, [input])
                raise
        if self.norm is None:
            return y
        return self.norm(y) if dim is None else normed(self.norm, y, self._place, dim), y

    def _summed(
        self, input: torch.Tensor, residual: torch.Tensor | None, seed: int | None
    ) -> tuple[torch.Tensor, int | None]:
        """The sum with what follows, and the dimension of which each rank has a part."""
        x, weight, bias = self._local(input, self._input)
        place = self._place
        shape = (*x.shape[:-1], weight.shape[0])
        blocks, dim = None, None
        placement: Placement = Replicate()
        if self.sequence_dim is not None:
            dim = self._dim(x)
            shape = self._part(shape, dim, place.size)
            blocks, placement = Blocks.of(x.shape[:-1], dim, place.size), Shard(dim)
        if isinstance(residual, DTensor):
            residual = residual.redistribute(placements=[placement]).to_local()
        if residual is not None and residual.shape != shape:
            raise ValueError(
                f"{self._title}: the residual has the shape {tuple(residual.shape)}, the output "
                f"{shape}" + ("" if blocks is None else f", this rank's part of dimension {dim}")
            )
        p = self.dropout if self.training else 0.0
        if not p:
            seed = 0
        elif seed is None:
            seed = int(torch.randint(1 << 62, ()).item())
        elif not 0 <= seed < 1 << 64:
            raise ValueError(f"a seed is a number from 0 to 2^64 - 1, got {seed}")
        rows = x.reshape(-1, x.shape[-1])
        given = None if residual is None else residual.reshape(-1, shape[-1])
        tensors = (rows, weight, bias, given)
        function = Rows.apply if _wants_gradients(tensors) else summed_rows
        epilogue = Epilogue(p=p, seed=seed, overlap=self.overlap, blocks=blocks)
        y: torch.Tensor = function(*tensors, place, epilogue)
        return y.view(shape), dim

    def _part(self, whole: tuple[int, ...], dim: int, ranks: int) -> tuple[int, ...]:
        """The shape of this rank's part."""
        if whole[dim] % ranks:
            raise ValueError(
                f"{self._title}: dimension {dim} of the input has size {whole[dim]}, which is "
                f"not divisible by {ranks} ranks: pad it to {-(-whole[dim] // ranks) * ranks}"
            )
        return (*whole[:dim], whole[dim] // ranks, *whole[dim + 1 :])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout={self.dropout}{_described(self)}"


def _local_part(parameter: torch.Tensor) -> torch.Tensor:
    # FSDP hands out plain tensors where the mesh has one rank.
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.is_grad_enabled():
        return parameter.to_local()
    return parameter._local_tensor  # without the view that autograd would need


def _wants_gradients(tensors: Sequence[torch.Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _described(layer: ParallelLinear) -> str:
    return "" if layer.sequence_dim is None else f", sequence_dim={layer.sequence_dim}"


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """As autocast does for `F.linear`: float64 stays."""
    if x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _mesh(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu" if device == "meta" else device)
