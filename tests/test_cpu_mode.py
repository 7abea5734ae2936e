"""CPU mode: what it changes, that it restores all of it, and which arguments it sets or refuses."""

from __future__ import annotations

import enum
import subprocess
import sys
import textwrap
import types

import pytest
import torch
from torch.utils import _device

from megatron_scalevec import cpu
from megatron_scalevec.cpu import attention, optimizers, streams
from megatron_scalevec.cpu.devices import to_cpu_device
from megatron_scalevec.errors import ScaleVecError

CHANGED_OWNERS = (
    torch,
    torch.Tensor,
    torch.cuda,
    torch.cuda.nvtx,
    torch.cuda.random,
    torch.distributed,
    _device.DeviceContext,
)


def attributes(*owners):
    """Every attribute an owner holds itself, by identity: inherited ones must not appear."""
    return {(id(owner), name): value for owner in owners for name, value in vars(owner).items()}


def differing(before, after):
    names = {name for _, name in before.keys() ^ after.keys()}
    return names | {key[1] for key in before.keys() & after.keys() if before[key] is not after[key]}


@pytest.fixture
def cpu_mode():
    assert not cpu.installed()
    cpu.install()
    yield
    cpu.uninstall()


@pytest.fixture(scope="module")
def warm():
    """Install once and remove, so that Megatron's imports are no change of a later comparison."""
    cpu.install()
    cpu.uninstall()


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )


# ------------------------------------------------------------------------------- life cycle


def test_import_changes_nothing_and_loads_nothing_heavy():
    done = run_python(
        """
        import sys
        import megatron_scalevec.cpu as cpu
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert "megatron" not in loaded, "Megatron was imported"
        assert "torch._dynamo" not in sys.modules
        assert not cpu.installed()
        import torch
        assert not hasattr(torch.zeros, "__wrapped__")
        assert not hasattr(torch.Tensor.to, "__wrapped__")
        """
    )
    assert done.returncode == 0, done.stderr


def test_uninstall_restores_every_attribute(warm):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    owners = (
        *CHANGED_OWNERS,
        DistributedOptimizer,
        DotProductAttention,
        WrappedTorchNorm,
        random,
        token_dispatcher,
    )
    before = attributes(*owners)
    cpu.install()
    try:
        during = attributes(*owners)
        cpu.install()  # the second call must not wrap the wrappers
        assert differing(during, attributes(*owners)) == set()
        assert {"zeros", "to", "Stream", "get_rng_state", "all_gather"} <= differing(before, during)
        assert {"__new__", "forward", "_set_cuda_rng_state"} <= differing(before, during)
    finally:
        cpu.uninstall()
    assert differing(before, attributes(*owners)) == set()
    assert not cpu.installed()
    cpu.uninstall()  # harmless


def test_a_failing_installation_is_undone(warm, monkeypatch):
    before = attributes(*CHANGED_OWNERS)

    def fail(patches):
        raise RuntimeError("no")

    monkeypatch.setattr(attention, "patch_attention", fail)
    with pytest.raises(RuntimeError):
        cpu.install()
    assert not cpu.installed()
    assert differing(before, attributes(*CHANGED_OWNERS)) == set()


def test_says_once_and_on_rank_zero_that_it_is_on(warm, monkeypatch, capfd):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        cpu.install()
        cpu.install()
        cpu.uninstall()
        error = capfd.readouterr().err
        assert error.count("CPU mode is on") == lines
        assert error.count("\n") == lines


def test_gpu_packages_are_hidden_and_come_back(warm, monkeypatch):
    package = types.ModuleType("transformer_engine")
    inner = types.ModuleType("transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", inner)
    cpu.install()
    try:
        with pytest.raises(ModuleNotFoundError):
            import transformer_engine  # noqa: F401
        with pytest.raises(ModuleNotFoundError):
            import transformer_engine.pytorch  # noqa: F401
    finally:
        cpu.uninstall()
    assert sys.modules["transformer_engine"] is package
    assert sys.modules["transformer_engine.pytorch"] is inner
    assert "apex" not in sys.modules


def test_refuses_a_megatron_that_has_chosen_gpu_optimizers(warm, monkeypatch):
    optimizer = pytest.importorskip("megatron.core.optimizer")
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    with pytest.raises(ScaleVecError, match="before the first import of megatron"):
        cpu.install()
    assert not cpu.installed()


def test_cuda_available_is_the_machines_answer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.cuda_available()
    cpu.install()
    try:
        assert cpu.cuda_available()
        assert not torch.cuda.is_available()
    finally:
        cpu.uninstall()


# ------------------------------------------------------------------------------- torch


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 3), 0, 1])
def test_cuda_devices_become_the_cpu(device):
    assert to_cpu_device(device) == torch.device("cpu")


@pytest.mark.parametrize("device", [None, "cpu", "meta", torch.device("meta")])
def test_other_devices_are_kept(device):
    assert to_cpu_device(device) == device


def test_tensors_on_cuda_are_made_on_the_cpu(cpu_mode):
    tensor = torch.zeros(2, device="cuda", pin_memory=True)
    made = [
        tensor,
        torch.tensor([1.0], device=torch.device("cuda:0")),
        torch.empty(2, device=torch.cuda.current_device()),
        torch.full((2,), 1.0, device="cuda"),
        torch.zeros_like(tensor, device="cuda"),
        tensor.new_empty(3, device="cuda"),
        tensor.to("cuda"),
        tensor.to(device="cuda", dtype=torch.bfloat16),
        tensor.to(torch.cuda.current_device()),
        tensor.cuda(non_blocking=True),
        tensor.pin_memory(),
        torch.nn.Linear(2, 2, device="cuda").weight,
        torch.nn.Linear(2, 2).cuda(torch.cuda.current_device()).weight,
        torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
        torch.cuda.LongTensor([1, 2]),
    ]
    assert {value.device.type for value in made} == {"cpu"}
    assert tensor.to(torch.float64).dtype == torch.float64
    assert tensor.to(made[1].double()).dtype == torch.float64


def test_device_contexts_still_apply(cpu_mode):
    with torch.device("meta"):
        assert torch.zeros(2).is_meta
        assert torch.nn.Linear(2, 2).weight.is_meta
        assert torch.zeros(2, device="cuda").device.type == "cpu"  # an explicit device wins
    with torch.device("cuda"):
        assert torch.zeros(2).device.type == "cpu"


def test_type_names_are_those_the_optimizers_ask_for(cpu_mode):
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64


def test_streams_and_events(cpu_mode):
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    side = torch.cuda.Stream(device="cuda", priority=-1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        side.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is side
        event = side.record_event()
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    torch.cuda.current_stream().wait_event(event)
    torch.zeros(1).record_stream(side)
    end.record(side)
    end.synchronize()
    assert isinstance(event, torch.cuda.Event) and event.query() and side.query()
    assert start.elapsed_time(end) >= 0.0
    with pytest.raises(RuntimeError):
        streams.CPUEvent().elapsed_time(end)


def test_random_state_is_the_default_generators(cpu_mode):
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.random.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.manual_seed(7)  # calls torch.cuda.manual_seed_all
    assert torch.equal(torch.rand(3), first)
    with pytest.warns(UserWarning, match="saved on a GPU"):
        torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))


def test_device_queries_answer(cpu_mode, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == 4
    torch.cuda.set_device(2)
    assert torch.cuda.current_device() == 2
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
    assert torch.cuda.max_memory_allocated() == 0
    assert torch.cuda.get_device_properties(0).major == torch.cuda.get_device_capability()[0]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.nvtx.range_push("name")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.device(0):
        pass


def test_torch_compile_is_ignored(cpu_mode):
    calls = []

    @torch.compile
    def function(x):
        calls.append(type(x))
        return x + 1

    assert function(torch.zeros(1)).item() == 1.0
    assert calls == [torch.Tensor]


# ------------------------------------------------------------------------------- Megatron


@pytest.fixture
def model_parallel(cpu_mode, tmp_path):
    """One gloo rank with every model-parallel group."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield parallel_state
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def small_config(**changes):
    from megatron.core.transformer import TransformerConfig

    settings = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
    }
    return TransformerConfig(**{**settings, **changes})


def test_sequence_parallel_layers_build(model_parallel):
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = small_config()
    config.sequence_parallel = True  # the constructor wants a tensor-parallel size above one
    norm = WrappedTorchNorm(config, 8)
    assert isinstance(norm, torch.nn.RMSNorm)
    assert norm.weight.sequence_parallel is True
    assert config.sequence_parallel is True
    config.sequence_parallel = False
    assert not hasattr(WrappedTorchNorm(config, 8).weight, "sequence_parallel")

    linear = ColumnParallelLinear(8, 4, config=config, init_method=torch.nn.init.ones_, bias=False)
    output, _ = linear(norm(torch.ones(3, 1, 8, device=torch.cuda.current_device())))
    assert output.shape == (3, 1, 4)
    assert torch.allclose(output, torch.full_like(output, 8.0))


def test_random_tracker_forks_without_a_warning(model_parallel, caplog):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(2), first)
    assert "CPU RNG state" not in caplog.text


def attend(config, **changes):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    return DotProductAttention(config, 1, AttnMaskType.causal, "self", **changes)


def test_attention_takes_the_channels_of_mla(model_parallel):
    core = attend(small_config(), softmax_scale=0.5, k_channels=6, v_channels=3)
    query, key = torch.rand(4, 1, 2, 6), torch.rand(4, 1, 2, 6)
    output = core(query, key, torch.rand(4, 1, 2, 3), None)
    assert output.shape == (4, 1, 6)


@pytest.mark.parametrize("window", [None, (2, 0)])
def test_context_parallel_attention_is_the_whole_attention(model_parallel, monkeypatch, window):
    """Two ranks played one after the other: gathering is replaced by handing out the whole."""
    torch.manual_seed(0)
    length, size = 8, 2
    query, key, value = (torch.rand(length, 1, 2, 4) for _ in range(3))
    config = small_config(window_size=window)
    expected = attend(config)(query, key, value, None)

    config.context_parallel_size = size
    core = attend(config)
    assert core.config is config
    whole = {}
    monkeypatch.setattr(attention, "gather_sequence", lambda local, group: whole[id(local)])
    for rank in range(size):
        group = types.SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        monkeypatch.setattr(attention, "_context_parallel_group", lambda _, group=group: group)
        own = attention.local_positions(length, size, rank)
        local_key, local_value = key[own], value[own]
        whole = {id(local_key): key, id(local_value): value}
        assert torch.allclose(core(query[own], local_key, local_value, None), expected[own])
    assert attention.local_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert attention.local_positions(8, 2, 1).tolist() == [2, 3, 4, 5]


def test_gathering_over_one_rank_is_the_identity(model_parallel):
    local = torch.rand(4, 2, requires_grad=True)
    gathered = attention.gather_sequence(local, model_parallel.get_context_parallel_group())
    assert torch.equal(gathered, local)
    weights = torch.rand(4, 2)
    (gathered * weights).sum().backward()
    assert torch.equal(local.grad, weights)


def test_moe_split_sizes_become_numpy(cpu_mode):
    dispatcher = pytest.importorskip("megatron.core.transformer.moe.token_dispatcher")
    sizes = torch.tensor([1, 2])
    assert dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True).tolist() == [1, 2]
    assert dispatcher.maybe_move_tensor_to_cpu(sizes) is sizes
    assert dispatcher.maybe_move_tensor_to_cpu([3], as_numpy=True) == [3]


def test_names_that_only_transformer_engine_defines(cpu_mode):
    multi_latent_attention = pytest.importorskip("megatron.core.transformer.multi_latent_attention")
    from megatron.core.transformer.moe import moe_utils

    assert moe_utils.te_general_gemm is None
    assert multi_latent_attention.HAVE_TE is False


class StandInOptimizer:
    """The parts of DistributedOptimizer around its inner torch Adam."""

    def __init__(self):
        self.parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1)
        self.model_param_group_index_map = {"first": (0, 0), "second": (0, 1)}

    def state_dict(self):
        return {state["step"].item() for state in self.optimizer.state.values()}

    def load_state_dict(self, step):
        for parameter in self.parameters:
            self.optimizer.state[parameter]["step"] = step

    def set_states(self, name, tensors):
        group, order = self.model_param_group_index_map[name]
        parameter = self.optimizer.param_groups[group]["params"][order]
        for key, value in {"param": parameter, **self.optimizer.state[parameter]}.items():
            value.copy_(tensors[key])


def test_states_of_a_fresh_optimizer_agree_on_their_step():
    standing = StandInOptimizer()
    state_dict = optimizers._make_state_dict(StandInOptimizer.state_dict)
    assert state_dict(standing) == {0.0}
    standing.optimizer.state[standing.parameters[0]]["exp_avg"].fill_(3.0)
    state_dict(standing)
    assert standing.optimizer.state[standing.parameters[0]]["exp_avg"].tolist() == [3.0, 3.0]


def test_loaded_steps_count_on_their_own():
    standing = StandInOptimizer()
    optimizers._make_state_dict(StandInOptimizer.state_dict)(standing)
    load = optimizers._make_load_state_dict(StandInOptimizer.load_state_dict)
    load(standing, torch.tensor(5.0))
    for parameter in standing.parameters:
        parameter.grad = torch.ones(2)
    standing.optimizer.step()
    assert standing.state_dict() == {6.0}


@pytest.mark.parametrize("extra", [{}, {"step": torch.tensor(0.0)}])
def test_loading_tensors_leaves_the_loaded_step(extra):
    standing = StandInOptimizer()
    optimizers._make_state_dict(StandInOptimizer.state_dict)(standing)
    standing.load_state_dict(torch.tensor(5.0))
    set_states = optimizers._make_set_parameter_states(StandInOptimizer.set_states)
    ones = {name: torch.ones(2) for name in ("param", "exp_avg", "exp_avg_sq")}
    set_states(standing, "second", {**ones, **extra})
    assert standing.state_dict() == {5.0}
    assert standing.parameters[1].tolist() == [1.0, 1.0]


def test_recomputation_refills_discarded_outputs(model_parallel):
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    x = torch.rand(4, requires_grad=True)
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(torch.sin, x)
    output = hidden * hidden
    checkpoint.discard_output_and_register_recompute(output)
    output.sum().backward()
    with torch.no_grad():
        assert torch.allclose(x.grad, 2 * torch.sin(x) * torch.cos(x))


def test_dataset_helpers_are_not_compiled_again(cpu_mode, monkeypatch):
    pytest.importorskip("megatron.core.datasets.helpers_cpp")
    from megatron.core.datasets import utils

    def run(*args, **kwargs):
        raise AssertionError("make was run")

    monkeypatch.setattr(subprocess, "run", run)
    utils.compile_helpers()


def test_unequal_all_gather(cpu_mode, tmp_path):
    """Two real ranks: the second is a subprocess."""
    code = """
        import sys, torch
        from megatron_scalevec.cpu.collectives import patch_collectives
        from megatron_scalevec.patching import PatchSet
        patch_collectives(PatchSet())
        rank = int(sys.argv[1])
        torch.distributed.init_process_group(
            "gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2
        )
        for asynchronous in (False, True):
            own = torch.full((rank + 1,), float(rank))
            parts = [own if i == rank else torch.empty(i + 1) for i in range(2)]
            work = torch.distributed.all_gather(parts, own, async_op=asynchronous)
            if asynchronous:
                work.wait()
            assert [part.tolist() for part in parts] == [[0.0], [1.0, 1.0]]
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error


@pytest.mark.needs_training
def test_megatron_initializes_without_cuda(cpu_mode, monkeypatch):
    initialize = pytest.importorskip("megatron.training.initialize")
    import megatron.training

    assert megatron.training.initialize_megatron is initialize.initialize_megatron
    with pytest.raises(Exception) as caught:  # no arguments have been parsed
        megatron.training.initialize_megatron()
    assert "requires CUDA" not in str(caught.value)
    assert initialize.set_jit_fusion_options() is None


# ------------------------------------------------------------------------------- arguments


class Backend(enum.Enum):
    """Megatron's AttnBackend, as far as it matters."""

    flash = 1
    unfused = 3
    local = 4
    auto = 5


def megatron_arguments(**changes):
    """Defaults of Megatron's parser that CPU mode looks at (0.19)."""
    args = {
        "distributed_backend": "nccl",
        "transformer_impl": "transformer_engine",
        "use_cpu_initialization": None,
        "attention_backend": Backend.auto,
        "gradient_accumulation_fusion": True,
        "masked_softmax_fusion": True,
        "bias_gelu_fusion": True,
        "bias_swiglu_fusion": True,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": True,
        "no_persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
        "cross_entropy_fusion_impl": "native",
        "tp_comm_overlap": False,
        "cuda_graph_impl": "none",
        "cuda_graph_modules": [],
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "allgather",
        "exp_avg_dtype": "fp32",
        "cpu_offloading_num_layers": 0,
        "tensor_model_parallel_size": 2,
        "tensor_parallel_num_weight_shards": None,
        "spec": None,
        "fp8": None,
        "fp4": None,
    }
    return types.SimpleNamespace(**{**args, **changes})


@pytest.fixture(autouse=True)
def connections(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def test_choices_for_a_default_run():
    args = megatron_arguments()
    assert cpu.choose_arguments(args) == [
        "--distributed-backend nccl -> gloo",
        "--transformer-impl transformer_engine -> local",
        "--use-cpu-initialization added",
        "--attention-backend auto -> unfused",
        "--no-gradient-accumulation-fusion added",
        "--no-masked-softmax-fusion added",
        "--no-bias-gelu-fusion added",
        "--no-bias-swiglu-fusion added",
        "--no-rope-fusion added",
        "--no-persist-layer-norm added",
    ]
    assert args.distributed_backend == "gloo"
    assert args.transformer_impl == "local"
    assert args.use_cpu_initialization is True
    assert args.attention_backend is Backend.unfused
    assert args.gradient_accumulation_fusion is False
    assert args.no_persist_layer_norm is True
    assert args.bias_dropout_fusion is True
    assert cpu.choose_arguments(args) == []


@pytest.mark.parametrize(
    ("given", "line", "wanted"),
    [
        ({"tp_comm_overlap": True}, "--tp-comm-overlap dropped", False),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local -> none", "none"),
        (
            {"cuda_graph_modules": [Backend.flash, Backend.local]},
            "--cuda-graph-modules flash local dropped",
            [],
        ),
        ({"moe_grouped_gemm": True}, "--moe-grouped-gemm dropped", False),
        (
            {"moe_token_dispatcher_type": "flex"},
            "--moe-token-dispatcher-type flex -> alltoall",
            "alltoall",
        ),
        ({"exp_avg_dtype": "fp8"}, "--exp-avg-dtype fp8 -> fp32", "fp32"),
        ({"cpu_offloading_num_layers": 2}, "--cpu-offloading-num-layers 2 -> 0", 0),
        ({"cross_entropy_fusion_impl": "te"}, "--cross-entropy-fusion-impl te -> native", "native"),
    ],
)
def test_choices_for_gpu_options(given, line, wanted):
    args = megatron_arguments(**given)
    assert line in cpu.choose_arguments(args)
    assert getattr(args, next(iter(given))) == wanted


def test_what_serves_a_cpu_is_kept():
    args = megatron_arguments(attention_backend=Backend.local, moe_token_dispatcher_type="alltoall")
    cpu.choose_arguments(args)
    assert args.attention_backend is Backend.local
    assert args.moe_token_dispatcher_type == "alltoall"


def test_the_connection_check_is_satisfied(monkeypatch):
    args = megatron_arguments()
    cpu.choose_arguments(args)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert cpu.choose_arguments(args) == ["CUDA_DEVICE_MAX_CONNECTIONS (unset) -> 1"]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert cpu.choose_arguments(args) == ["CUDA_DEVICE_MAX_CONNECTIONS 32 -> 1"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"fp8": "e4m3"}, "--fp8-format e4m3"),
        ({"fp4": "e2m1"}, "--fp4-format e2m1"),
        ({"te_precision_config_file": "f.yaml"}, "--te-precision-config-file f.yaml"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"use_transformer_engine_op_fuser": True}, "--use-transformer-engine-op-fuser"),
        ({"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized"),
        ({"use_kitchen_attention": True}, "--use-kitchen-attention"),
        ({"mla_down_proj_fusion": True}, "--mla-down-proj-fusion"),
        ({"tensor_parallel_num_weight_shards": 4}, "--tensor-parallel-num-weight-shards 4"),
        (
            {
                "expert_tensor_parallel_num_weight_shards": 4,
                "expert_tensor_parallel_size": None,
            },
            "--expert-tensor-parallel-num-weight-shards 4",
        ),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
        (
            {"experimental_attention_variant": "dsa"},
            "--experimental-attention-variant dsa",
        ),
        ({"hybrid_override_pattern": "M*D"}, "--hybrid-override-pattern M*D"),
        ({"hybrid_layer_pattern": "M*/*"}, "--hybrid-layer-pattern M*/*"),
        ({"sft": True}, "--sft"),
        ({"dataloader_inter_document_masking": True}, "--dataloader-inter-document-masking"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        ({"rl_use_sequence_packing": True}, "--rl-use-sequence-packing"),
        ({"perform_rl_step": True}, "--perform-rl-step"),
        ({"batch_invariant_mode": True}, "--batch-invariant-mode"),
        ({"inprocess_restart": True}, "--inprocess-restart"),
    ],
)
def test_refusals(given, named):
    args = megatron_arguments(**given)
    before = dict(vars(args))
    with pytest.raises(ScaleVecError) as caught:
        cpu.choose_arguments(args)
    message = str(caught.value)
    assert message.startswith(f"{named} cannot be served in CPU mode, because ")
    assert message.count(".") - named.count(".") - message.count("pretrain_gpt.py") == 1
    assert vars(args) == before


def test_what_looks_alike_is_not_refused():
    cpu.choose_arguments(megatron_arguments(tensor_parallel_num_weight_shards=2))
    cpu.choose_arguments(megatron_arguments(hybrid_override_pattern="*D", spec=["my.module", "stack"]))
    with pytest.raises(ScaleVecError):
        cpu.choose_arguments(
            megatron_arguments(hybrid_override_pattern="*D", spec=["megatron.core.models", "x"])
        )


@pytest.mark.parametrize(
    "spec", [None, ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]]
)
def test_hybrid_models_get_a_stack_of_local_layers(spec):
    args = megatron_arguments(hybrid_layer_pattern="M*-", spec=spec)
    changes = cpu.choose_arguments(args)
    assert args.spec == ["megatron_scalevec.cpu.hybrid_stack", "stack"]
    given = " ".join(spec) if spec else "(none)"
    assert f"--spec {given} -> megatron_scalevec.cpu.hybrid_stack stack" in changes
    # Of the layers, --qk-layernorm means those of latent attention alone.
    for pattern, own in (("M+-", True), ("M*-", False)):
        args = megatron_arguments(hybrid_layer_pattern=pattern, spec=spec, qk_layernorm=True)
        cpu.choose_arguments(args)
        assert args.spec[1] == ("stack_with_latent_norms" if own else "stack")
    own = megatron_arguments(hybrid_layer_pattern="M*-", spec=["my.module", "stack"])
    cpu.choose_arguments(own)
    assert own.spec == ["my.module", "stack"]
