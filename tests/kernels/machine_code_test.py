"""Loops of machine code, counted by hand."""

import pytest
from machine_code import loops_of, program_of

_PROGRAM = """
\t.target\tsm_90a
.text.kernel:
{before}   -:-:-:Y:05        /*0010*/                   MOV R1, R2
.L_x_1:
   -:1:2:Y:03        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [R5+URZ], R4
   2:-:-:Y:05        /*0030*/              @!P2 BRA `(.L_x_1)
.L_x_2:
   1:-:-:Y:01        /*0040*/                   FFMA R6, R25, R140, R6
   -:-:-:Y:01  /*0050*/  QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR24], RZ, !UPT
{between}   -:-:-:Y:01  /*0070*/  QGMMA.64x128x32 R24, gdesc[UR24], R24, gsb0
   -:-:1:Y:04        /*0080*/                   LDS R148, [R12+UR12]
   -:-:-:Y:02        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0
{copies}   1:-:-:Y:06        /*00a0*/               @P2 BRA `(.L_x_2)
   -:-:-:Y:06        /*00b0*/                   BRA `(.L_x_3)
{after}.L_x_3:
   -:-:-:Y:05        /*0190*/                   EXIT
"""
_COPIES = """
   -:1:2:Y:03        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R5+URZ], R4
   -:-:-:Y:01        /*0110*/                   @UP1 UTMALDG.4D [UR24], [UR18]
"""


def _program(**parts: str) -> str:
  empty = dict.fromkeys(("before", "between", "copies", "after"), "")
  return _PROGRAM.format(**empty | parts)


def test_a_loop_is_counted_from_its_label_to_its_branch():
  assert loops_of(_program()) == {"consumer": 6, "waits": 0}
  # Two chains are two steps; the second goes around the end.
  more = _program(between="   -:-:-:Y:01  /*0060*/  QGMMA.64x128x32 R24, gdesc[UR24], RZ, !UPT\n")
  assert loops_of(more) == {"consumer": 3.5, "waits": 0}


def test_what_waits_between_the_products_of_a_chain_is_counted():
  for line, waits in (
    ("1:-:-:Y:01  /*0060*/  LEA R142, P3, R148, R4.reuse, 0x2", 1),
    ("5&1:-:-:Y:01  /*0060*/  FMUL R140, R148, R153", 1),
    ("-:-:-:Y:02  /*0060*/  WARPGROUP.DEPBAR.LE gsb0, 0x0", 1),
    ("-:1:2:Y:02  /*0060*/  LDS R148, [R12+UR12]", 0),
  ):
    assert loops_of(_program(between=f"   {line}\n"))["waits"] == waits, line


def test_who_copies_has_a_loop_of_its_own_or_none():
  assert loops_of(_program(copies=_COPIES)) == {"consumer": 8, "waits": 0}
  twice = f".L_x_9:\n{_COPIES}{_COPIES}   -:-:-:Y:06  /*0120*/  @P1 BRA `(.L_x_9)\n"
  assert loops_of(_program(after=twice)) == {"consumer": 6, "waits": 0, "producer": 2.5}
  filled = f"{_COPIES}   -:-:-:Y:00  /*0130*/  NOP\n"
  assert program_of(_program(after=filled)) == {"program": 13}
  with pytest.raises(ValueError, match="no loop multiplies"):
    loops_of(_COPIES)
