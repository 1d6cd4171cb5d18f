"""SGLang as a generation engine, through its plug-in hooks. Nothing here has run on a GPU yet."""
