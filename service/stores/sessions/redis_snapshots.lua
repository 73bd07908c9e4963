-- Put after redis_common.lua before the scripts that store snapshots.
-- The staged snapshot becomes the newest. Older ones whose versions are not in `kept` (joined by commas) go; the newest
-- until now is one of them. Returns the changes of the head.
local function replace_snapshot(head, kept, version, position, bytes, checksum)
  kept = ',' .. kept .. ','
  local function is_kept(one) return string.find(kept, ',' .. one .. ',', 1, true) end
  local retained = thin_retained(head, function(one) return is_kept(one.version) end)
  local last = snapshot_version(head)
  if last ~= '0' and is_kept(last) and redis.call('EXISTS', snapshot_key) == 1 then
    local is_taken, slot = {}, 1
    for taken in string.gmatch(retained, '(%d+):%d+:%d+:%d+') do is_taken[taken] = true end
    while is_taken[tostring(slot)] do slot = slot + 1 end
    redis.call('RENAME', snapshot_key, retained_key(slot))
    local entry = table.concat({slot, last, snapshot_position(head), head.snapshot_bytes}, ':')
    retained = (retained == '' and '' or retained .. ',') .. entry
  end
  take_staged()
  return {
    retained = retained, snapshot_version = version, snapshot_position = position, snapshot_bytes = bytes,
    snapshot_checksum = checksum,
  }
end
