"""The side of the connector that runs in each worker process, beside the model."""
