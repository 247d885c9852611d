"""Runs of other tools, read from their files and stores: TensorBoard, W&B, MLflow, Neptune and tables."""
