"""Start a training job on SageMaker (pip install sagemaker-train) with the image of docker/Dockerfile.cuda, as root, in your registry.

    python examples/cluster/launch_sagemaker.py --image ACCOUNT.dkr.ecr.REGION.amazonaws.com/hone:sagemaker --role ROLE_ARN \
        --bucket s3://my-bucket/hone [--instances 2] [--instance-type ml.p5.48xlarge] [key=value ...]

The bucket has model/ and data/ (train.parquet, val.parquet); runs/JOB gets checkpoints and the model. The same job name resumes.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from sagemaker.core.training import configs  # pyright: ignore[reportMissingImports]
from sagemaker.train import ModelTrainer  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Start the job that the command line describes, and show its log until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--image", required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--job", default="hone-grpo")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--instance-type", default="ml.p5.48xlarge")
    parser.add_argument("keys", nargs="*", help="key=value, as for hone train")
    options = parser.parse_args()

    runs = f"{options.bucket.rstrip('/')}/runs/{options.job}"
    trainer = ModelTrainer(
        training_image=options.image,
        role=options.role,
        base_job_name=options.job,
        source_code=configs.SourceCode(source_dir=str(Path(__file__).parent), entry_script="sagemaker_entry.sh"),
        compute=configs.Compute(
            instance_type=options.instance_type, instance_count=options.instances, volume_size_in_gb=512
        ),
        input_data_config=[
            configs.InputData(channel_name=name, data_source=f"{options.bucket.rstrip('/')}/{name}")
            for name in ("model", "data")
        ],
        checkpoint_config=configs.CheckpointConfig(s3_uri=f"{runs}/checkpoints"),
        output_data_config=configs.OutputDataConfig(s3_output_path=f"{runs}/output"),
        environment={"RAY_AUTH_TOKEN": secrets.token_hex(32)},  # keeps others out of this job's cluster
        hyperparameters=dict(key.split("=", 1) for key in options.keys),
    )
    trainer.train()


if __name__ == "__main__":
    main()
