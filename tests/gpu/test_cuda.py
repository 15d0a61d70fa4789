"""What only a CUDA device can show: graphs that CUDA records, copies that run beside the host, memory that is measured.

The engine's own tests run there too, with FOREWORD_TEST_DEVICE=cuda; `make test-gpu` does both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from doors import runner_of
from foreword import LLM, SamplingParams
from foreword.model.gpu.device import CudaDevice
from foreword.model.gpu.runner import DeviceRunner, RunnerLimits, StepBuffer
from foreword.model.layout import LayoutOptions
from foreword.model.loader import LoadedModel
from foreword.model.memory import measure_memory_use
from tiny_models import TinyModels, build_engine, complete, greedy, random_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]
FAMILIES = ["llama", "gemma2", "mistral", "odd_llama", "gemma4_text"]


@pytest.fixture
def cuda() -> CudaDevice:
    return CudaDevice(torch.device("cuda"))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_graphs_change_no_bit(tiny_models: TinyModels, family: str, dtype: str, exact: bool) -> None:
    """Equal shapes with and without graphs, so equal bits are due in both modes."""
    model: LoadedModel = replace(tiny_models.loaded(family, dtype), exact=exact)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    prompts = [random_tokens(rng, int(rng.integers(1, 60))) for _ in range(8)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16, logprobs=3, ignore_eos=True)

    def run(sizes: tuple[int, ...]) -> tuple[list[object], int]:
        def make(model: LoadedModel, storage: object) -> DeviceRunner:
            limits = RunnerLimits(200, 8, sizes)
            return DeviceRunner(model, storage, CudaDevice(model.device), limits)  # type: ignore[arg-type]

        engine = build_engine(model, runner_class=make)
        outputs = complete(engine, prompts, params)
        runner = runner_of(engine)
        assert isinstance(runner, DeviceRunner)
        replays = 0 if runner.graphs is None else runner.graphs.num_replays
        return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs], replays

    (expected, none), (answers, replays) = run(()), run((8,))
    assert answers == expected
    assert none == 0
    assert replays >= 10


def test_one_copy_brings_all_arrays(cuda: CudaDevice) -> None:
    buffer = StepBuffer(cuda, 4096)
    rng = np.random.default_rng(0)
    for step in range(50):
        buffer.begin()
        arrays = [rng.integers(0, 100, rng.integers(1, 200)).astype(np.int32) for _ in range(5)]
        arrays.append(rng.normal(size=(3, 7)))
        tensors = [buffer.put(array) for array in arrays]
        buffer.upload()
        cuda.mark().synchronize()
        assert all((tensor.cpu().numpy() == array).all() for tensor, array in zip(tensors, arrays, strict=True)), step


def test_memory_is_measured_with_the_largest_step(tiny_models: TinyModels, cuda: CudaDevice) -> None:
    model = tiny_models.loaded("llama")
    layout = model.plan_layout(LayoutOptions(16))
    small = measure_memory_use(model, layout, cuda, RunnerLimits(512, 8, ()), 64)
    large = measure_memory_use(model, layout, cuda, RunnerLimits(512, 8, ()), 4096)
    assert large.activations_bytes > small.activations_bytes >= 0
    assert large.total_bytes == torch.cuda.get_device_properties(cuda.torch_device).total_memory


def test_an_llm_sizes_its_pool_and_answers_hits_as_misses(tiny_models: TinyModels) -> None:
    prompt = {"prompt_token_ids": random_tokens(np.random.default_rng(5), 300)}
    folder = str(tiny_models.folder("llama"))
    with LLM(folder, device="cuda", gpu_memory_utilization=0.3) as llm:
        assert llm.inexactness is None
        first, second = (llm.generate(prompt, greedy(16))[0] for _ in range(2))
    assert second.num_cached_tokens == 299
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
