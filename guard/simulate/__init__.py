"""The built-in traffic source: invented engines and requests, real recorder, exporter, directives and gate."""
