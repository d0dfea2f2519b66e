"""The account of collectives: written HLO by hand, and programs whose traffic is arithmetic."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax import mesh as mesh_lib
from fp8jax.compiled import collectives
from fp8jax.compiled.collectives import Collective

MESH = {"data": 2, "fsdp": 4, "tensor": 1}
HLO = """HloModule step
%scattered (p.1: f32[64,8]) -> f32[16,8] {
  %p.1 = f32[64,8]{1,0} parameter(0)
  ROOT %scatter = f32[16,8]{1,0} reduce-scatter(%p.1), replica_groups=[2,4]<=[8]
}

%multiplied (p.2: f32[64,8]) -> f32[64,64] {
  %p.2 = f32[64,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[64,64]{1,0} dot(%p.2, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%body (carry: (s32[], u8[16,8])) -> (s32[], u8[16,8]) {
  %carry = (s32[], u8[16,8]) parameter(0)
  %x = u8[16,8]{1,0} get-tuple-element(%carry), index=1
  %half = bf16[4]{0} constant(0)
  %wide = f32[64,8]{1,0} convert(%x)
  %gather = (u8[16,8]{1,0}, u8[64,8]{1,0}) all-gather-start(%x), FSDP
  %product = f32[64,64]{1,0} fusion(%wide), kind=kOutput, calls=%multiplied
  %gathered = u8[64,8]{1,0} all-gather-done(%gather)
  %early = (u8[16,8]{1,0}, u8[64,8]{1,0}) all-gather-start(%x), FSDP
  %late = u8[64,8]{1,0} all-gather-done(%early)
  %other = f32[64,64]{1,0} dot(%wide, %wide), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %now = ((f32[64,8]{1,0}), f32[16,8]{1,0}) async-start(%wide), calls=%scattered, SYNC
  %soon = ((f32[64,8]{1,0}), f32[16,8]{1,0}) async-start(%wide), calls=%scattered
  %again = f32[64,64]{1,0} dot(%wide, %wide), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %ended = f32[16,8]{1,0} async-done(%soon)
  %sums = (f32[64,8]{1,0}, /*index=1*/bf16[4]{0}) all-reduce(%wide, /*index=1*/%half), DATA
}

ENTRY %main (a: f32[10]) -> f32[10] {
  %a = f32[10]{0} parameter(0)
  %loop = (s32[], u8[16,8]) while(%init), condition=%c, body=%body, TRIPS
  %alone = f32[10]{0} all-reduce(%a), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}
  %ring = f32[10]{0} collective-permute(%a), source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5}}
  %chain = f32[10]{0} collective-permute(%a), source_target_pairs={{1,0},{2,1},{3,2}}
  %turned = f32[10]{0} collective-permute(%a), source_target_pairs={{0,0},{1,5},{5,1},{2,6},{6,2}}
  %still = f32[10]{0} collective-permute(%a), source_target_pairs={{0,0},{1,1}}
  %half = f32[10]{0} all-to-all(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}
}
"""


LONG = {
  "DATA": "replica_groups=[4,2]<=[2,4]T(1,0)",
  "FSDP": "replica_groups=mesh['data'=2,'fsdp'=4,'tensor'=1] {'fsdp'}",
  "SYNC": 'backend_config={"collective_backend_config":{"is_sync":true}}',
  "TRIPS": 'backend_config={"known_trip_count":{"n":"3"}}',
}


def test_counts_bytes_axes_and_overlap_of_a_program_by_hand():
  text = functools.reduce(lambda text, pair: text.replace(*pair), LONG.items(), HLO)
  assert {*collectives.account(text, MESH)} == {
    # Twice three executions; a device has 16 rows and receives 48. A product is beside one of two.
    Collective("all-gather", "u8", ("fsdp",), True, 6, 6 * 48 * 8, 3 * 48 * 8),
    Collective("reduce-scatter", "f32", ("fsdp",), False, 3, 3 * 48 * 8 * 4),
    Collective("reduce-scatter", "f32", ("fsdp",), True, 3, 3 * 48 * 8 * 4, 3 * 48 * 8 * 4),
    Collective("all-reduce", "f32", ("data",), False, 3, 3 * (64 * 8 * 4 + 4 * 2)),
    Collective("collective-permute", "f32", ("fsdp",), False, 2, 80),
    Collective("collective-permute", "f32", ("data",), False, 1, 40),
    Collective("all-to-all", "f32", ("groups of 2",), False, 1, 20),
  }


def test_a_loop_of_sums_gathers_and_scatters_over_a_real_mesh():
  mesh = mesh_lib.make((2, 4, 1))
  spec = PartitionSpec(("data", "fsdp"))

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
  def moved(x):
    def one(carry, _):
      whole = jax.lax.all_gather(carry, "fsdp", axis=0, tiled=True)
      back = jax.lax.psum_scatter(jnp.sin(whole), "fsdp", tiled=True)
      return jnp.cos(back) + jax.lax.psum(back, "data"), None

    return jax.lax.scan(one, x, length=5)[0]

  x = jax.ShapeDtypeStruct((64, 3), jnp.float32, sharding=NamedSharding(mesh, spec))
  rows = collectives.account(jax.jit(moved).lower(x).compile().as_text(), dict(mesh.shape))
  shard = 8 * 3 * 4
  assert {*rows} == {
    Collective("all-gather", "f32", ("fsdp",), False, 5, 5 * 3 * shard),
    Collective("reduce-scatter", "f32", ("fsdp",), False, 5, 5 * 3 * shard),
    Collective("all-reduce", "f32", ("data",), False, 5, 5 * shard),
  }


@pytest.mark.parametrize("nbytes, shown", [(1000, 2), (1001, 1)])
def test_what_moves_little_is_not_shown(nbytes, shown):
  rows = [Collective("all-gather", "u8", ("fsdp",), True, 1, n).__dict__ for n in (nbytes, 1)]
  made = collectives.lines(rows)
  assert len(made) == shown and "all-gather of u8 over fsdp: 1 per step, asynchronous" in made[0]
  assert collectives.lines([]) == []
