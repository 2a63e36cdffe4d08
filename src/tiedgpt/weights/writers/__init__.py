"""Writers of other projects' formats: one small file each."""
