#!lua
-- ARGV: created_us, version, position, snapshot_bytes, snapshot_checksum, versions of older snapshots that stay (joined
-- by commas).
local function refuse()
  redis.call('UNLINK', staged_key)
  return {'refused'}
end

-- Whether a turn of the log ended as this version, with all `position` tokens fed or one less.
local function has_version()
  for index = -1, -redis.call('LLEN', marks_key), -1 do
    local version, num_tokens = string.match(redis.call('LINDEX', marks_key, index), '^(%d+):(%d+)')
    if tonumber(version) <= tonumber(ARGV[2]) then
      local num_pending = tonumber(num_tokens) - tonumber(ARGV[3])
      return version == ARGV[2] and (num_pending == 0 or num_pending == 1)
    end
  end
  return false
end

local head = read_head()
if not head or head.created_us ~= ARGV[1] then return refuse() end
-- This call again, after its answer was lost.
if head.snapshot_version == ARGV[2] and head.snapshot_checksum == ARGV[5] then return answer('ok') end
if tonumber(snapshot_version(head)) >= tonumber(ARGV[2]) or not has_version() then return refuse() end
if redis.call('EXISTS', staged_key) == 0 then return {'unstaged'} end
write_head(head, replace_snapshot(head, ARGV[6], ARGV[2], ARGV[3], ARGV[4], ARGV[5]))
return answer('ok')
