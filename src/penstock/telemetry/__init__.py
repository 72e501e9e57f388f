"""OpenTelemetry names and instruments: spans and metrics of the engines, off until a provider is given."""
