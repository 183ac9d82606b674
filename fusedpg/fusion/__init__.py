"""Elementwise programs around collectives: traced, checked, scheduled (docs/guides/fusion.md)."""

from torch.distributed.tensor import Partial as Partial
from torch.distributed.tensor import Replicate as Replicate
from torch.distributed.tensor import Shard as Shard

from fusedpg.fusion.api import FusedFunction as FusedFunction
from fusedpg.fusion.api import Pending as Pending
from fusedpg.fusion.api import fuse as fuse
from fusedpg.fusion.errors import FusionError as FusionError
from fusedpg.fusion.errors import IllegalProgram as IllegalProgram
from fusedpg.fusion.errors import IllegalTransformation as IllegalTransformation
from fusedpg.fusion.functions import all_gather as all_gather
from fusedpg.fusion.functions import all_reduce as all_reduce
from fusedpg.fusion.functions import broadcast as broadcast
from fusedpg.fusion.functions import dropout as dropout
from fusedpg.fusion.functions import recv as recv
from fusedpg.fusion.functions import reduce_scatter as reduce_scatter
from fusedpg.fusion.functions import send as send
from fusedpg.fusion.ir import Program as Program
from fusedpg.fusion.own_rows import OwnRows as OwnRows
from fusedpg.fusion.schedule import Schedule as Schedule
from fusedpg.fusion.schedule import schedules as schedules
from fusedpg.fusion.transformations import AsShard as AsShard
from fusedpg.fusion.transformations import FuseCollective as FuseCollective
from fusedpg.fusion.transformations import FuseCompute as FuseCompute
from fusedpg.fusion.transformations import FuseSend as FuseSend
from fusedpg.fusion.transformations import Overlap as Overlap
from fusedpg.fusion.transformations import Reorder as Reorder
from fusedpg.fusion.transformations import Split as Split
from fusedpg.fusion.transformations import Transformation as Transformation
from fusedpg.fusion.tune import Report as Report
from fusedpg.fusion.tune import Timed as Timed
