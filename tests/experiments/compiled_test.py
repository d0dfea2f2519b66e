"""experiments/bench/compiled/run.py: launches and bytes of a program, counted by hand."""

import importlib.util
import pathlib

PATH = pathlib.Path(__file__).parents[2] / "experiments/bench/compiled/run.py"
# Two microbatches of three layers. Bytes: f32[4,8] is 128, a layer of the stack f32[3,4,8] too.
TEXT = """HloModule step

%fused_add (p0: f32[3,4,8], p1: f32[4,8], p2: s32[]) -> f32[3,4,8] {
  %p0 = f32[3,4,8] parameter(0)
  %p1 = f32[4,8] parameter(1)
  %p2 = s32[] parameter(2)
  %old = f32[1,4,8] dynamic-slice(%p0, %p2, %p2, %p2), dynamic_slice_sizes={1,4,8}
  %flat = f32[4,8] bitcast(%old)
  %sum = f32[4,8] add(%flat, %p1)
  %new = f32[1,4,8] bitcast(%sum)
  ROOT %put = f32[3,4,8] dynamic-update-slice(%p0, %new, %p2, %p2, %p2)
}

%fused_take (p3: f32[3,4,8], p4: s32[]) -> f32[1,4,8] {
  %p3 = f32[3,4,8] parameter(0)
  %p4 = s32[] parameter(1)
  ROOT %taken = f32[1,4,8] dynamic-slice(%p3, %p4, %p4, %p4), dynamic_slice_sizes={1,4,8}
}

%dynamic-slice-fusion (p5: f32[3,4,8], p6: f32[4,8], p7: s32[1], p8: f32[3,4,8], p9: s32[]) -> f32[3,4,8] {
  %p5 = f32[3,4,8] parameter(0)
  %p6 = f32[4,8] parameter(1)
  %p7 = s32[1] parameter(2)
  %p8 = f32[3,4,8] parameter(3)
  %p9 = s32[] parameter(4)
  %y = f32[4,8] custom-call(%p6, %p5, %p7), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/mlp/up:fwd/scaled_matmul/mpmd_map"}
  %as_entry = f32[1,4,8] bitcast(%y)
  ROOT %stored = f32[3,4,8] dynamic-update-slice(%p8, %as_entry, %p9, %p9, %p9)
}

%layer (t0: (f32[3,4,8], f32[4,8])) -> (f32[3,4,8], f32[4,8]) {
  %t0 = (f32[3,4,8], f32[4,8]) parameter(0)
  %stack = f32[3,4,8] get-tuple-element(%t0), index=0
  %x = f32[4,8] get-tuple-element(%t0), index=1
  %i = s32[] constant(1)
  %q = (f8e4m3fn[4,8], f32[4,1]) custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/quantize/quantize_fp8"}
  %mm = (f32[4,8], s8[64]) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  %g = f32[4,8] get-tuple-element(%mm), index=0
  %n = s32[2] constant({1, 0})
  %into = f32[3,4,8] custom-call(%x, %n, %stack), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/mlp/up:wgrad/scaled_matmul/mpmd_map"}
  %room = f32[3,4,8] custom-call(), custom_call_target="AllocateBuffer"
  %one = s32[1] constant({1})
  %own = f32[3,4,8] fusion(%stack, %x, %one, %room, %i), kind=kCustom, calls=%dynamic-slice-fusion
  %fusion.2 = f32[1,4,8] fusion(%stack, %i), kind=kLoop, calls=%fused_take
  %fusion.1 = f32[3,4,8] fusion(%stack, %g, %i), kind=kLoop, calls=%fused_add
  ROOT %t1 = (f32[3,4,8], f32[4,8]) tuple(%fusion.1, %x)
}

%micro (t2: (f32[3,4,8], f32[4,8])) -> (f32[3,4,8], f32[4,8]) {
  %t2 = (f32[3,4,8], f32[4,8]) parameter(0)
  ROOT %layers = (f32[3,4,8], f32[4,8]) while(%t2), condition=%c, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (a: f32[3,4,8], b: f32[4,8]) -> f32[3,4,8] {
  %a = f32[3,4,8] parameter(0)
  %b = f32[4,8] parameter(1)
  %t3 = (f32[3,4,8], f32[4,8]) tuple(%a, %b)
  %steps = (f32[3,4,8], f32[4,8]) while(%t3), condition=%c, body=%micro, backend_config={"known_trip_count":{"n":"2"}}
  %sums = f32[3,4,8] get-tuple-element(%steps), index=0
  %ag-start = (f32[3,4,8], f32[6,4,8]) all-gather-start(%sums), replica_groups={{0,1}}, dimensions={0}
  %ag = f32[6,4,8] all-gather-done(%ag-start)
  ROOT %out = f32[3,4,8] copy(%sums), metadata={op_name="jit(step)/optimizer/copy"}
}
"""  # noqa: E501


def test_launches_and_bytes_are_counted_by_hand():
  module = importlib.util.module_from_spec(
    spec := importlib.util.spec_from_file_location("r", PATH)
  )
  spec.loader.exec_module(module)
  found = module.count(TEXT, 2)
  kernel = {"launches": 3, "quantizations": 3, "bytes": 3 * (128 + 32 + 16)}
  # A product, one that is added to a layer of a stack, two of whose numbers are 8 bytes, and one
  # that XLA has written into its layer of memory that is empty: two numbers besides.
  product = {"launches": 9, "quantizations": 0, "bytes": 3 * (3 * 128) + 6 * (3 * 128 + 8)}
  # What was there, what is added, what is written, and the number of the layer; a layer read,
  # written, and its number.
  added = {"launches": 6, "quantizations": 0, "bytes": 3 * (3 * 128 + 4) + 3 * (2 * 128 + 4)}
  assert found["microbatch"] == {"quantize": kernel, "product": product, "other": added}
  assert found["step"] == {
    "collective": {"launches": 1, "quantizations": 0, "bytes": 0},
    "optimizer": {"launches": 1, "quantizations": 0, "bytes": 2 * 3 * 128},
  }
