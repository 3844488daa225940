"""The half of the connector that runs in each worker process, beside the model."""
