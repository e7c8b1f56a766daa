"""The search for the modules that have to stay in FP32."""
