import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WIRE = ROOT / "src" / "tinkex" / "wire"
SCRIPT = ROOT / "tools" / "generate_proto.py"


@pytest.mark.parametrize("name", ["tinkex_pb2.py", "tinkex_pb2.pyi"])
def test_generating_again_gives_the_checked_in_file(tmp_path: Path, name: str):
    spec = importlib.util.spec_from_file_location("generate_proto", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path)
    assert (tmp_path / name).read_bytes() == (WIRE / name).read_bytes()


def test_the_messages_live_in_a_package_of_their_own():
    from tinkex.wire import tinkex_pb2 as pb

    assert pb.Datum.DESCRIPTOR.full_name == "tinkex.wire.Datum"


def test_the_constants_of_the_codec_are_the_schemas():
    from tinkex.wire import tinkex_pb2 as pb
    from tinkex.wire import values

    assert (values.FLOAT32, values.INT64) == (pb.DTYPE_FLOAT32, pb.DTYPE_INT64)
    assert (values.INT32, values.BFLOAT16) == (pb.DTYPE_INT32, pb.DTYPE_BFLOAT16)
    assert (pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH) == (0, 1)
