"""The command lines that Graphcore's two benchmark documents print, as they print them."""

M2000, POD16, POD64 = "1 x IPU-M2000", "1 x IPU-POD16", "1 x IPU-POD64"


def _poprun(replicas: int, parts: int) -> str:
    return (
        f"poprun --numa-aware 1 --num-replicas {replicas} --ipus-per-replica {parts} "
        f"--num-instances {replicas}"
    )


def _poprun_64(server: str, config: str, more: str = "") -> str:
    hosts = ",".join(f"xxx.xxx.xxx.xx{number}" for number in (1, 2, 3, 4))
    return (
        f"poprun -vv --host {hosts} --numa-aware=yes {more}--vipu-server-host={server} "
        "--vipu-partition=pod64_partition_name --reset-partition=no --update-partition=no "
        '--mpi-global-args="--tag-output --mca btl_tcp_if_include xxx.xxx.xxx.0/xx" '
        '--mpi-local-args="--tag-output -x LD_LIBRARY_PATH -x PATH -x PYTHONPATH '
        "-x IPUOF_VIPU_API_TIMEOUT=300 -x OPAL_PREFIX "
        '-x TF_POPLAR_FLAGS=--executable_cache_path=/localdata/$USER/exec_cache" '
        "--num-replicas=16 --num-instances=16 --ipus-per-replica 4 "
        f"python3 train.py --config {config} --no-validation --epochs 10"
    )


def _resnet_50(replicas: str, accumulation: int) -> str:
    return (
        "python train.py --model resnet --model-size 50 --dataset imagenet "
        f"--data-dir $DATASETS_DIR/ --ckpts-per-epoch 0 --batch-size 16 {replicas}"
        f"--gradient-accumulation-count {accumulation} --epochs 1 --no-validation "
        "--enable-recomputation --optimiser momentum --momentum 0.9 --normalise-input "
        "--stable-norm --internal-exchange-optimisation-target balanced --enable-half-partials "
        "--standard-imagenet --pipeline-num-parallel 32 --pipeline-schedule Grouped "
        "--no-dataset-cache --shards=4 --pipeline-splits b1/2/relu b2/3/relu b3/3/relu "
        "--pipeline --batch-norm --available-memory-proportion 0.15 "
        "--disable-variable-offloading --precision 16.32 --eight-bit-io"
    )


def _resnext_101(replicas: str, accumulation: int, standard: str) -> str:
    return (
        "python train.py --model resnext --model-size 101 --dataset imagenet "
        f"--data-dir $DATASETS_DIR --shards 2 {replicas}--batch-size 6 --pipeline "
        f"--gradient-accumulation-count {accumulation} --pipeline-splits b3/3/relu --epoch 2 "
        "--ckpts-per-epoch 0 --enable-recomputation --normalise-input "
        "--internal-exchange-optimisation-target balanced --enable-half-partials --stable-norm "
        "--base-learning-rate -11 --pipeline-schedule Grouped --optimiser momentum "
        "--momentum 0.9 --lr-schedule cosine --label-smoothing 0.1 --no-validation "
        f"--disable-variable-offloading {standard}--eight-bit-io"
    )


def _efficientnet_b4(accumulation: int, epochs: int) -> str:
    return (
        "python3 train.py --model=efficientnet --model-size=4 --data-dir $DATASETS_DIR/ "
        "--precision=16.32 --group-dim=16 --expand-ratio=4 --dataset=imagenet --groups=4 "
        "--optimiser=RMSprop --lr-schedule=exponential --enable-recomputation "
        "--enable-conv-dithering --available-memory-proportion=0.15 --pipeline-schedule Grouped "
        "--internal-exchange-optimisation-target balanced --weight-avg-exp 0.97 "
        "--enable-half-partials --cutmix-lambda 0.85 --mixup-alpha=0.2 "
        "--disable-variable-offloading --batch-size=5 --shards=4 "
        "--pipeline-split block2c block4c block6a --pipeline "
        f"--gradient-accumulation-count={accumulation} --no-validation --epochs {epochs}"
    )


RESNET_50 = {
    M2000: _resnet_50("--replicas 1 ", 1024),
    POD16: "poprun --numa-aware=yes --num-replicas=4 --num-instances=4 --ipus-per-replica 4 "
    + _resnet_50("", 256),
    POD64: _poprun_64("xxx.xxx.xxx.xxx", "mk2_resnet50_bn_64ipus") + " --ckpts-per-epoch 0",
}
RESNEXT_101 = {
    M2000: _resnext_101("--replicas 2 ", 64, ""),
    POD16: f"{_poprun(8, 2)} {_resnext_101('', 16, '--standard-imagenet ')}",
}
EFFICIENTNET_B4_STANDARD = {
    M2000: _efficientnet_b4(40, 2),
    POD16: f"{_poprun(4, 4)} {_efficientnet_b4(40, 1)}",
    POD64: _poprun_64("xxx.xxx.xxx.xx1", "mk2_efficientnet_b4_g1_64ipus"),
}
EFFICIENTNET_B4_MODIFIED = {
    M2000: _efficientnet_b4(160, 2),
    POD16: f"{_poprun(4, 4)} {_efficientnet_b4(40, 1)}",
    POD64: _poprun_64(
        "xxx.xxx.xxx.xx1", "mk2_efficientnet_b4_g16_64ipus", "--only-output-from-instance 0 "
    ),
}


def image_inference(model: str, batch_size: int, data: str) -> str:
    """Returns the benchmark of a network.

    Args:
        model: such as "resnet --model-size 50".
        data: "synthetic", on one IPU, or "generated", on four.
    """
    precision = "--precision 16.16 " if model.startswith("efficientnet") else ""
    printed = (
        f"python3 validation.py --model {model} --dataset imagenet {precision}"
        f"--batch-size {batch_size} --{data}-data --repeat 10 --batch-norm --enable-half-partials"
    )
    if data == "synthetic":
        return printed
    poprun = "poprun --num-replicas 4 --ipus-per-replica 1 --num-instances 4 --numa-aware 1"
    return f"{poprun} {printed} --eight-bit-io"


def pretraining(python: str, name: str, length: int, before: str = "", after: str = "") -> str:
    """Returns the pre-training of BERT by a configuration.

    Args:
        name: of the configuration, such as "large_128".
        before, after: flags that the input and the rest stand between.
    """
    return (
        f"{python} bert.py --config configs/mk2/pretrain_{name}.json {before}"
        f"--input-files=$DATASETS_DIR/wikipedia/AA/sequence_{length}/wiki_00_tokenised --epochs 1 "
        f"{after}"
    ).rstrip()


def squad_inference(micro_batch: int, low_latency: bool) -> str:
    """Returns the benchmark of BERT that reads batches ahead, or that does not."""
    low, minimum = str(low_latency).lower(), str(not low_latency).lower()
    return (
        "python3 bert.py --task SQUAD --layers-per-ipu=3 --num-layers=3 --hidden-size=768 "
        "--attention-heads=12 --sequence-length=128 --dtype=FLOAT16 --batches-per-step=2048 "
        "--generated-data=true --no-model-save --host-embedding=NONE "
        f"--low-latency-inference={low} --minimum-latency-inference={minimum} "
        "--input-files=$DATASETS_DIR/squad/dev-v1.1.json --inference --encoder-start-ipu=0 "
        "--use-default-available-memory-proportion=true --max-copy-merge-size=-1 --shuffle=false "
        f"--micro-batch-size {micro_batch} --enable-half-partials --epochs-inference 10 "
        "--group-host-sync --no-outlining=false --steps-per-log=1"
    )
