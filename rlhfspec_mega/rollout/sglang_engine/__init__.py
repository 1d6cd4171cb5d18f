"""SGLang as a generation engine, through its plug-in hooks. It has run on CPUs, not on a GPU yet."""
