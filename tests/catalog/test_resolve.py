"""Whatever a person gives for a model: paths, names, ids in the local hub cache, one file fetched when asked for."""
import json
import os
import struct
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

import kvlab
from kvlab.catalog import resolve
from kvlab.catalog.resolve import model

CONFIG = dict(model_type="llama", num_hidden_layers=4, hidden_size=512, num_attention_heads=8, num_key_value_heads=2,
              head_dim=64, vocab_size=32000, max_position_embeddings=4096)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def add_weights(folder, name="model.safetensors"):
    header = json.dumps({"a": dict(dtype="F32", shape=[10, 3], data_offsets=[0, 120])}).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + bytes(120))
    return folder / name


def test_a_file_and_its_folder_are_one_model(folder):
    spec = model(str(folder))
    assert spec.layers == model(str(folder / "config.json")).layers and spec.num_layers == 4
    assert spec.params is None and kvlab.model_spec(str(folder)) == spec


def test_a_file_of_any_name_is_read_as_a_config(folder):
    (folder / "other").write_text(json.dumps(CONFIG))
    add_weights(folder)
    assert model(str(folder / "other")).layers == model(str(folder)).layers
    assert model(str(folder / "other")).params is None, "weights belong to the config.json beside them"


def test_weights_beside_the_config_are_counted(folder):
    path = add_weights(folder)
    for given in (folder, folder / "config.json", path):
        spec = model(str(given))
        assert (spec.params, spec.weight_bytes, spec.num_layers) == (30, 120, 4) and "weights" in spec.source


@pytest.mark.parametrize("name", ["model-0000{}-of-00002.safetensors", "model-0000{}-of-000002.safetensors"])
def test_a_shard_stands_for_all_shards(folder, name):
    """Also one of DeepSeek's, whose second number has six digits."""
    path = add_weights(folder, name.format(1))
    add_weights(folder, name.format(2))
    with pytest.raises(ValueError, match="index.json cannot be read"):
        model(str(path))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": path.name}}))
    assert model(str(path)).params == 30


def test_weights_without_tensors_are_unknown(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    for given in (folder, folder / "model.safetensors"):
        spec = model(str(given))
        assert (spec.params, spec.weight_bytes) == (None, None) and "holds no tensors" in spec.assumed[-1]


def test_weights_that_are_not_all_there_are_said_and_left_out(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    spec = model(str(folder))
    assert spec.params is None and any("weights beside it are not counted" in text and "gone.safetensors" in text
                                       for text in spec.assumed)


def test_weights_alone_do_not_say_how_layers_cache(tmp_path):
    with pytest.raises(ValueError, match="30 parameters in 120 bytes.*config.json is missing beside it"):
        model(str(add_weights(tmp_path)))


@pytest.mark.parametrize("given, error, message", [
    ("", ValueError, "no model is given"),
    ("  ", ValueError, "no model is given"),
    ("nothing.json", ValueError, "nothing.json does not exist; give a name from"),
    ("no/such/folder", ValueError, "does not exist"),
    ("./qwen2-72b", ValueError, "does not exist"),
    ("qwen2-72c", KeyError, "no model named.*What may be given: a name from `kvlab ls models`, a config.json"),
    ("a\nb", KeyError, "no model named"),
    ("x" * 5000, KeyError, "no model named"),
    ("a\0b", KeyError, "no model named"),
])
def test_what_is_not_there_is_refused_with_what_may_be_given(given, error, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        model(given)


def test_names_of_the_catalogue_still_work(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert model("qwen2-72b").name == "Qwen/Qwen2-72B-Instruct"
    (tmp_path / "qwen2-72b").mkdir()
    (tmp_path / "qwen2-72b" / "config.json").write_text(json.dumps(CONFIG))
    assert model("qwen2-72b").num_layers == 4, "a path that exists comes first"


def test_folders_links_pipes_and_devices_neither_crash_nor_hang(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        model(str(tmp_path))
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    for path in (tmp_path / "one", tmp_path / "one.gguf"):
        if not path.is_symlink():
            path.symlink_to(tmp_path / "one")
        with pytest.raises(ValueError, match="cannot be read"):
            model(str(path))
    (tmp_path / "config.json").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="cannot be read"):
        model(str(tmp_path))
    if hasattr(os, "mkfifo"):
        for name in ("pipe.json", "pipe.gguf", "pipe.safetensors"):
            os.mkfifo(tmp_path / name)
            with pytest.raises(ValueError, match="not a regular file"):
                model(str(tmp_path / name))
    if os.path.exists("/dev/zero"):
        with pytest.raises(ValueError, match="not a regular file"):
            model("/dev/zero")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(folder):
    (folder / "config.json").chmod(0)
    with pytest.raises(ValueError, match="cannot be read"):
        model(str(folder))


# --- the hub ---------------------------------------------------------------------------------------------------------

def run(script, **environment):
    """A fresh process, since the hub library reads its environment when it is imported: (exit code, stdout, stderr)."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean | environment)
    return done.returncode, done.stdout, done.stderr


def cached(tmp_path):
    """A hub cache that holds the config of org/model."""
    repository = tmp_path / "models--org--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


SHOW = "from kvlab.catalog.resolve import model\nspec = model({!r}, download={!r})\nprint(spec.name, spec.num_layers)"


@pytest.mark.parametrize("variable, below", [("HF_HUB_CACHE", ""), ("HF_HOME", "hub")])
def test_an_id_in_the_local_cache_is_read_offline(tmp_path, variable, below):
    pytest.importorskip("huggingface_hub")
    cached(tmp_path / below)
    code, out, err = run(SHOW.format("org/model", False), HF_HUB_OFFLINE="1", **{variable: str(tmp_path)})
    assert (code, out) == (0, "org/model 4\n"), err


def test_an_id_that_is_nowhere_is_not_fetched_unasked(tmp_path):
    pytest.importorskip("huggingface_hub")
    code, _, err = run(SHOW.format("org/model", False), HF_HUB_CACHE=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 1 and "not in the local Hugging Face cache either; --download fetches its config.json" in err
    assert list(tmp_path.iterdir()) == []


def test_without_the_hub_library_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(KeyError, match=r"was not looked at.*pip install 'kvlab\[models\]'"):
        model("org/model")


class Hub(BaseHTTPRequestHandler):
    """A hub that has the config of org/model, and remembers what it was asked for."""
    asked: list[str] = []

    def do_HEAD(self):
        self.asked.append(self.path)
        self._answer(False)

    def do_GET(self):
        self.asked.append(self.path)
        self._answer(True)

    def _answer(self, whole):
        found = self.path in [f"/org/model/resolve/{revision}/config.json" for revision in ("main", COMMIT)]
        data = json.dumps(CONFIG).encode() if found else b""
        self.send_response(200 if found else 404)
        for key, value in {"X-Repo-Commit": COMMIT, "ETag": '"abc"', "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if whole:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    """The address of a hub of our own on this machine."""
    Hub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_download_fetches_the_config_and_nothing_else(tmp_path, hub):
    pytest.importorskip("huggingface_hub")
    environment = dict(HF_HUB_CACHE=str(tmp_path), HF_ENDPOINT=hub, HF_HUB_DISABLE_TELEMETRY="1", NO_PROXY="127.0.0.1")
    code, out, err = run(SHOW.format("org/model", True), **environment)
    assert (code, out) == (0, "org/model 4\n"), err
    assert Hub.asked and all(path.endswith("/config.json") for path in Hub.asked)
    Hub.asked.clear()
    assert run(SHOW.format("org/model", True), **environment)[:2] == (0, "org/model 4\n")
    assert Hub.asked == [], "what is cached is not fetched again"
    code, _, err = run(SHOW.format("org/other", True), **environment)
    assert code == 1 and "OSError: the config.json of 'org/other' could not be fetched" in err


# --- the command -----------------------------------------------------------------------------------------------------

def kvlab_size(*arguments):
    done = subprocess.run([sys.executable, "-m", "kvlab", "size", *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_command_takes_a_config_and_names_what_it_assumed(folder):
    config = {key: value for key, value in CONFIG.items() if key not in ("head_dim", "num_key_value_heads")}
    (folder / "config.json").write_text(json.dumps(config))
    code, out, err = kvlab_size(folder, "--kv-len", 5000)
    assert code == 0 and "assumed: head_dim = hidden_size / num_attention_heads = 64" in out and "MHA" in out
    assert "beyond the 4,096 tokens of context that its file gives" in err
    code, out, _ = kvlab_size(folder, "--kv-len", 17, "--json")
    found = json.loads(out)
    assert found["kv_bytes"] == 17 * 4 * 2 * 8 * 64 * 2 and found["engine_bytes"] == 32 * 4 * 2 * 8 * 64 * 2
    assert found["max_batched_tokens"] == 8192 and found["growth_note"] == ""
    assert found["weights_are"] == "16 bit" and found["approximate"] == "" and len(found["assumed"]) == 2


def test_the_command_shows_what_a_file_says_escaped(folder):
    strange = folder / "red\x1b[31m\u202e"
    strange.mkdir()
    config = CONFIG | {"model_type": "new\x1b]0;title\x07\u202e"}
    (strange / "config.json").write_text(json.dumps(config))
    code, out, err = kvlab_size(strange, "--kv-len", 5000)
    assert code == 0 and "\\x1b[31m" in out and "model_type new\\x1b]0;title" in out and "\\x1b[31m" in err
    assert all(line.isprintable() for line in (out + err).splitlines())
    (strange / "config.json").write_text(json.dumps(config | {"kv_\x1b[2J": 1}))
    code, out, err = kvlab_size(strange, "--kv-len", 10)
    assert code == 2 and "kv_\\x1b[2J" in err and err.strip().isprintable()


def test_the_command_refuses_in_one_sentence_with_code_2(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"layer_types": ["magic"] * 4}))
    code, out, err = kvlab_size(folder, "--kv-len", 10)
    assert code == 2 and out == "" and err.startswith("kvlab: ") and err.count("\n") == 1 and "'magic'" in err


def test_a_local_config_is_sized_without_torch_pandas_or_the_hub(folder):
    script = (f"import sys\nfrom kvlab.catalog.resolve import model\nfrom kvlab.kv.sizing import size\n"
              f"size(model({str(folder)!r}), 4096)\n"
              "print(sorted({'torch', 'pandas', 'numpy', 'gguf', 'huggingface_hub'} & set(sys.modules)))")
    assert run(script)[1] == "[]\n"


def test_resolving_is_one_door_for_all():
    assert kvlab.model_spec is resolve.model


def test_missing_shards_leave_the_bytes_that_their_index_states(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(
        model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=100)))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"x")
    alone = model(str(tmp_path))
    assert alone.weight_bytes is None and "an index of shards is missing" in alone.assumed[-1]
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = model(str(tmp_path))
    assert found.weight_bytes == 16_060_522_496 and found.params is None
    assert "the index of shards states" in found.assumed[-1]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({**index, "metadata": {"total_size": True}}))
    assert model(str(tmp_path)).weight_bytes is None
