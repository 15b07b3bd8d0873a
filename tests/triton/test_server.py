"""A real Triton server gives raw rows the scores of testing, whatever else it receives.

The pip package nvidia-pytriton brings the server; `dlrm.deployment.server` starts it.
"""

import importlib.util
import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from triton_testing import ask, export_steps, raw, run_client

import dlrm
from dlrm.deployment import client as client_command, server as serve_command

pytestmark = pytest.mark.long
if importlib.util.find_spec("pytriton") is None:
    pytest.skip("nvidia-pytriton is not installed", allow_module_level=True)
grpc = pytest.importorskip("tritonclient.grpc", reason="needs dlrm[serve]")
http = pytest.importorskip("tritonclient.http", reason="needs dlrm[serve]")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

ANSWERS_WITHIN = 60  # seconds


@pytest.fixture(scope="module")
def server(export, serve, trained, tmp_path_factory):
    """Serves four models and polls the repository for changes every second."""
    directory = tmp_path_factory.mktemp("triton")
    repository = export(trained, directory / "repository")
    export(trained, repository, "--triton-model-name=waits", "--triton-dyn-batching-delay=300")
    export(trained, repository, "--triton-model-name=swapped")
    export_steps(export, trained, repository)
    poll = ["--model-control-mode=poll", "--repository-poll-secs=1", "--exit-timeout-secs=5"]
    with serve(repository, directory / "log", *poll) as running:
        yield running


@pytest.fixture(scope="module")
def expected(trained):
    """The logits of the test rows."""
    return dlrm.load(trained.checkpoint).logits(trained.rows)


def ids(*rows):
    numerical = np.zeros((len(rows), 3), np.float32)
    return {"input__0": numerical, "input__1": np.array(rows, np.int64)}


def scores(answer):
    return answer.as_numpy("output__0")[:, 0]


@pytest.mark.parametrize("model", ["model", "steps_raw"])
def test_raw_lines_get_the_scores_of_testing(server, trained, expected, model, tmp_path):
    flags = [f"--triton-model-name={model}", f"--output={tmp_path / 'scores.npy'}"]
    done = run_client("-u", server.grpc, "--input", trained.log, "--batch-size=300", *flags)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected, rtol=1e-4, atol=1e-5)
    assert "1,000 rows in 4 batches" in done.stdout


def test_the_client_reports(server, trained, expected, tmp_path):
    files = {name: tmp_path / name for name in ("scores.npy", "report.json")}
    done = run_client(
        *("-u", server.http, "--protocol=http", "--input", trained.dataset, "--batch-size=64"),
        *("--output", files["scores.npy"], "--report", files["report.json"]),
        *("-H", "x-test:1"),
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(files["scores.npy"]), expected, rtol=1e-4, atol=1e-5)
    labels = np.array([line[0] == "1" for line in trained.lines])
    pairs = expected[labels][:, None] - expected[~labels]
    auc = np.mean(pairs > 0) + np.mean(pairs == 0) / 2
    assert abs(float(done.stdout.split("AUC ")[1]) - auc) < 1e-4
    report = json.loads(files["report.json"].read_text())
    assert 0 < report["p50_ms"] <= report["p95_ms"] <= report["p99_ms"]


def test_the_client_takes_nvidias_flags(server, trained, expected, tmp_path):
    folder = trained.dataset / "test"
    flags = [f"--dataset_config={trained.dataset / 'feature_spec.yaml'}", "--fp16"]
    flags += ["--drop_last_batch", "--test_batches=9", f"--output={tmp_path / 'scores.npy'}"]
    words = ("--triton-server-url", server.http, "--inference_data", folder, "--batch_size=300")
    done = run_client(*words, *flags)
    assert done.returncode == 0, done.stderr
    assert "900 rows in 3 batches" in done.stdout
    found = np.load(tmp_path / "scores.npy")
    np.testing.assert_allclose(found, expected[:900], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "expected either --input or --inference_data"),
        (["--input=a", "--inference_data=a/test"], "expected either --input or --inference_data"),
        (
            ["--inference_data=a/test", "--dataset_config=b/model_size.json"],
            "--dataset_config b/model_size.json: expected a file of ",
        ),
    ],
)
def test_flags_of_the_client_that_contradict_each_other_are_refused(flags, message, capsys):
    assert client_command.main(flags) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_the_client_needs_the_package_of_its_own_protocol_only(trained, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "grpc", None)  # as after pip install tritonclient[http]
    for name in [name for name in sys.modules if name.startswith("tritonclient.grpc")]:
        monkeypatch.delitem(sys.modules, name)
    words = [f"--input={trained.log}", "-u", "localhost:1"]
    assert client_command.main(words) == 1
    assert re.fullmatch(r"error: .* pip install .*\n", capsys.readouterr().err)
    assert client_command.main([*words, "--protocol=http"]) == 1
    assert capsys.readouterr().err.startswith("error: no server answers at localhost:1; ")


def test_models_that_only_clients_could_load_are_refused(tmp_path, capsys):
    words = [f"--model-repository={tmp_path}", "--model-control-mode=explicit"]
    assert serve_command.main(words) == 1
    assert capsys.readouterr().err.startswith(
        "error: --model-control-mode=explicit: expected --load-model=NAME too, as clients may not "
    )


def test_models_of_other_backends_are_refused(tmp_path, capsys):
    platform = "onnxruntime_onnx"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.pbtxt").write_text(f'name: "model"\nplatform: "{platform}"\n')
    assert serve_command.main([f"--model-repository={tmp_path}"]) == 1
    line = (
        f"error: {tmp_path / 'model'}: needs Triton's {platform}, and this server has the python "
    )
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert "export.py --python" in said


def test_batches_beyond_the_largest_request_are_divided(server, trained, tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(trained.lines * 5) + "\n")
    done = run_client("-u", server.grpc, "--input", log, "--batch-size=5000")
    assert done.returncode == 0, done.stderr
    assert "5,000 rows in 1 batches" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--triton-model-name=none"], "unknown model: 'none'"),
        (["--input=/nowhere"], "/nowhere"),
        (["--split=none"], "--split none: expected one of"),
    ],
)
def test_the_client_says_what_is_wrong(server, trained, flags, message):
    done = run_client("-u", server.grpc, "--input", trained.dataset, *flags)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert message in done.stderr


BAD = [
    (raw(["1\tx"]), "row 0, column numerical 1: expected an integer of up to 18 digits, got 'x'"),
    (ids([0, 0, 0, 0], [0, 9999, 0, 0]), r"row 1, column categorical 1 \(table 1\): .* got 9999"),
    ({**ids([0, 0, 0, 0]), **raw(["1"])}, "got input__0, input__1, raw__0"),
    (raw(["1\t2"] * 4097), "batch-size must be <= 4096"),
    ({"raw__0": np.zeros((0, 3), np.uint8)}, "raw__0|batch"),
]


@pytest.mark.parametrize(("request_", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_request_is_told_what_is_wrong(server, trained, expected, request_, message):
    client = grpc.InferenceServerClient(server.grpc)
    with pytest.raises(grpc.InferenceServerException, match=message):
        ask(client, request_)
    answer = ask(client, raw(trained.rows[:2]))  # the next one is answered
    np.testing.assert_allclose(scores(answer), expected[:2], rtol=1e-4, atol=1e-5)


def test_one_bad_id_fails_its_own_request_only(server):
    """The model waits for more requests, so these are scored together."""
    before = batches(server)
    requests = [ids([i, 0, 0, 0]) for i in range(6)]
    requests[3]["input__1"][0, 2] = -5
    alone = [
        scores(ask(grpc.InferenceServerClient(server.grpc), r)) if i != 3 else None
        for i, r in enumerate(requests)
    ]

    def send(request):
        client = grpc.InferenceServerClient(server.grpc)
        try:
            return scores(ask(client, request, "waits"))
        except grpc.InferenceServerException as error:
            return error

    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(send, requests))
    assert "row 0, column categorical 2 (table 2): expected an id from 0" in str(answers.pop(3))
    alone.pop(3)
    np.testing.assert_allclose(np.concatenate(answers), np.concatenate(alone), rtol=1e-5)
    assert batches(server) - before < len(requests)  # some merged


def batches(server):
    """Counts the batches of the model "waits"."""
    client = grpc.InferenceServerClient(server.grpc)
    statistics = client.get_inference_statistics("waits", as_json=True)["model_stats"][0]
    return int(statistics.get("execution_count", 0))


def test_a_new_version_comes_without_a_gap(server, export, trained, expected):
    lines = trained.rows[:100]
    answers, errors, stop = [], [], threading.Event()

    def send():
        client = grpc.InferenceServerClient(server.grpc)
        while not stop.is_set():
            try:
                answer = ask(client, raw(lines), "swapped")
                answers.append((answer.get_response().model_version, scores(answer)))
            except grpc.InferenceServerException as error:
                errors.append(error)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        flags = ("--triton-model-name=swapped", "--update", "--embedding_precision=fp16")
        export(trained, server.repository, *flags)
        end = time.monotonic() + ANSWERS_WITHIN
        while time.monotonic() < end and not (answers and answers[-1][0] == "2"):
            time.sleep(0.1)
        time.sleep(1)  # requests reach only the new version
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    found = {version: [s for v, s in answers if v == version] for version, _ in answers}
    assert set(found) == {"1", "2"}
    new = found["2"][0]
    for version, logits in (("1", expected[:100]), ("2", new)):
        for one in found[version]:
            np.testing.assert_allclose(one, logits, rtol=1e-4, atol=1e-5)
    assert 1e-7 < np.abs(new - expected[:100]).max() < 1e-2  # fp16 tables
    log = (server.repository.parent / "log").read_text()
    assert log.count("TRITONBACKEND_ModelInstanceInitialize: swapped_") == 2  # each version once
    assert "Poll failed" not in log
    assert not [path for path in server.repository.rglob("__pycache__") if path.is_dir()]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_clients_can_neither_register_memory_nor_change_the_server(server, protocol):
    api = {"grpc": grpc, "http": http}[protocol]
    client = api.InferenceServerClient(getattr(server, protocol))
    for action, *arguments in (
        (client.register_system_shared_memory, "own", "/triton_python_backend_shm", 64),
        (client.register_cuda_shared_memory, "own", b"0" * 64, 0, 64),
        (client.get_system_shared_memory_status,),
        (client.unregister_system_shared_memory,),
        (client.unload_model, "model"),
        (client.load_model, "model"),
        (client.update_log_settings, {"log_verbose_level": 1}),
        (client.update_trace_settings, "model", {"trace_level": ["TIMESTAMPS"]}),
    ):
        with pytest.raises(InferenceServerException, match=r"This (API|protocol) is restricted"):
            action(*arguments)
    assert client.is_server_ready()
    assert client.get_model_metadata("model")
    assert client.get_inference_statistics("model")


def test_own_restrictions_replace_those_of_the_command():
    both = serve_command.restrictions(["--log-verbose=1"])
    assert [flag.partition("=")[0] for flag in both] == [
        "--http-restricted-api",
        "--grpc-restricted-protocol",
    ]
    assert all("=shared-memory,model-repository,trace,logging:dlrm-admin=" in f for f in both)
    assert serve_command.restrictions([]) != both  # random keys
    (left,) = serve_command.restrictions(["--http-restricted-api", "trace:a=b"])
    assert left.startswith("--grpc-restricted-protocol=")


@pytest.mark.parametrize(("shape", "size"), [([2**62, 4], 4), ([1, 2**20 + 1], 2**20 + 1)])
def test_shapes_that_lie_are_refused_and_others_answered(server, trained, expected, shape, size):
    client = http.InferenceServerClient(server.http)
    tensor = http.InferInput("raw__0", shape, "UINT8")
    tensor._raw_data = b"1" * size  # bypasses the client's check
    tensor._parameters["binary_data_size"] = size
    with pytest.raises(InferenceServerException, match="raw__0: expected .rows, width. of 1 to"):
        client.infer("model", [tensor])
    answer = ask(grpc.InferenceServerClient(server.grpc), raw(trained.rows[:2]))
    np.testing.assert_allclose(scores(answer), expected[:2], rtol=1e-4, atol=1e-5)
