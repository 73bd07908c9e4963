-- Put before every script of a session. KEYS: head (hash), log (list of chunks: 8 letters of their SHA-1, then
-- 4 bytes an id), marks (list of "version:num_log_tokens:num_sampled:seed"), snapshot (string), staged snapshot (string
-- under a short expiry), turns and tail (see redis_turns.lua), and the slots of older snapshots.
-- The head has the contents of the slots: "slot:version:position:bytes", joined by commas, oldest first.
local head_key, log_key, marks_key, snapshot_key, staged_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]

local function read_head()
  local flat = redis.call('HGETALL', head_key)
  if #flat == 0 then return nil end
  local head = {}
  for i = 1, #flat, 2 do head[flat[i]] = flat[i + 1] end
  return head
end

local function answer(status)
  return {status, redis.call('HGETALL', head_key)}
end

local SEAL_BYTES = 8

local function sealed(ids)
  return string.sub(redis.sha1hex(ids), 1, SEAL_BYTES) .. ids
end

-- The number of chunks that this adds.
local function append_log(ids)
  if #ids == 0 then return 0 end
  redis.call('RPUSH', log_key, sealed(ids))
  return 1
end

-- Why the log is not the head's, or nil. Without reading it: chunks and marks by their number, the last of each by
-- its content.
local function log_damage(head)
  local num_chunks, num_marks = redis.call('LLEN', log_key), redis.call('LLEN', marks_key)
  if num_chunks ~= tonumber(head.log_chunks) then
    return 'it has ' .. num_chunks .. ' of ' .. head.log_chunks .. ' parts'
  end
  if num_marks ~= tonumber(head.log_marks) then
    return 'it has ' .. num_marks .. ' of ' .. head.log_marks .. ' marks'
  end
  local last = redis.call('LINDEX', log_key, -1)
  if last and sealed(string.sub(last, SEAL_BYTES + 1)) ~= last then return 'its last part fails its checksum' end
  local mark = redis.call('LINDEX', marks_key, -1)
  local expected = head.version .. ':' .. head.num_log_tokens .. ':'
  if mark and string.sub(mark, 1, #expected) ~= expected then return 'its last mark is not the version of the session' end
  return nil
end

local function retained_key(slot)
  return KEYS[7 + slot]
end

-- Of the newest snapshot. Heads of key layout 1 do not have these: their snapshot is the head's.
local function snapshot_version(head)
  if head.snapshot_version then return head.snapshot_version end
  return head.snapshot_bytes == '0' and '0' or head.version
end

local function snapshot_position(head)
  if head.snapshot_position then return head.snapshot_position end
  return head.snapshot_bytes == '0' and '0' or head.position
end

-- The ids of the log from the newest snapshot's position on; or nil and the reason.
local function read_tail(head)
  local left, index, parts = tonumber(head.num_log_tokens) - tonumber(snapshot_position(head)), -1, {}
  while left > 0 do
    local chunk = redis.call('LINDEX', log_key, index)
    if not chunk then return nil, left .. ' tokens after its newest snapshot are missing' end
    local ids = string.sub(chunk, SEAL_BYTES + 1)
    if sealed(ids) ~= chunk then return nil, 'a part of it fails its checksum' end
    local num_ids = #ids / 4
    parts[#parts + 1] = left < num_ids and string.sub(ids, (num_ids - left) * 4 + 1) or ids
    left, index = left - num_ids, index - 1
  end
  for i = 1, math.floor(#parts / 2) do parts[i], parts[#parts + 1 - i] = parts[#parts + 1 - i], parts[i] end
  return table.concat(parts)
end

-- Those after the newest snapshot's version, newest first.
local function read_tail_marks(head)
  local marks, index, last = {}, -1, tonumber(snapshot_version(head))
  while true do
    local mark = redis.call('LINDEX', marks_key, index)
    if not mark or tonumber(string.match(mark, '^%d+')) <= last then return marks end
    marks[#marks + 1], index = mark, index - 1
  end
end

-- `answer` with the log from the newest snapshot on.
local function with_tail(head, status)
  local ids, damage = read_tail(head)
  if not ids then return {'log_corrupt', redis.call('HGETALL', head_key), damage} end
  return {status, redis.call('HGETALL', head_key), ids, read_tail_marks(head)}
end

local function read_retained(head)
  local retained = {}
  for slot, version, position, bytes in string.gmatch(head.retained, '(%d+):(%d+):(%d+):(%d+)') do
    retained[#retained + 1] = {slot = tonumber(slot), version = version, position = position, bytes = bytes}
  end
  return retained
end

-- Deletes those that `should_stay` refuses. Returns the field for the head.
local function thin_retained(head, should_stay)
  local left = {}
  for _, one in ipairs(read_retained(head)) do
    if should_stay(one) then
      left[#left + 1] = table.concat({one.slot, one.version, one.position, one.bytes}, ':')
    else
      redis.call('UNLINK', retained_key(one.slot))
    end
  end
  return table.concat(left, ',')
end

local function holds_lease(head, created_us, fence, holder)
  return head.created_us == created_us and head.fence == fence and head.holder == holder
end

-- The staged snapshot becomes the newest one, for good: it had an expiry.
local has_new_snapshot = false
local function take_staged()
  redis.call('RENAME', staged_key, snapshot_key)
  has_new_snapshot = true
end

-- Redis itself ends a session: at its expiry or, when a turn runs at that time, with the turn's lease. `had_expiry`,
-- `has_other_turns`: whether the keys have expiries that may not stay. What stays is not said again: the append-only
-- file would have it each time.
local function keep_alive(head, had_expiry, has_other_turns)
  local is_forever = head.expires_us == ''
  if is_forever and not (had_expiry or has_new_snapshot or has_other_turns) then return end
  local until_us = math.max(tonumber(head.expires_us) or 0, tonumber(head.lease_us) or 0)
  local keys = {head_key, log_key, marks_key, snapshot_key}
  for _, one in ipairs(read_retained(head)) do keys[#keys + 1] = retained_key(one.slot) end
  for _, key in ipairs(keys) do
    if not is_forever then
      redis.call('PEXPIREAT', key, whole(math.ceil(until_us / 1000)))
    elseif had_expiry or has_new_snapshot then
      redis.call('PERSIST', key)
    end
  end
  local turns_us = tonumber(head.turns_us) or 0 -- no turn record is needed for longer
  if turns_us > 0 and (not is_forever or had_expiry or has_other_turns) then
    if not is_forever then turns_us = math.min(turns_us, until_us) end
    for _, key in ipairs({KEYS[6], KEYS[7]}) do
      redis.call('PEXPIREAT', key, whole(math.ceil(turns_us / 1000)))
    end
  end
end

-- `has_new_turns`: the keys of the turn records, or of their chunks, are new.
local function write_head(head, changes, has_new_turns)
  local flat, had_expiry, turns_us = {}, (head.expires_us or '') ~= '', head.turns_us
  for field, value in pairs(changes) do
    if head[field] ~= tostring(value) then
      head[field] = tostring(value)
      flat[#flat + 1] = field
      flat[#flat + 1] = head[field]
    end
  end
  if #flat > 0 then redis.call('HSET', head_key, unpack(flat)) end
  keep_alive(head, had_expiry, has_new_turns or head.turns_us ~= turns_us)
end

local function renewed_expiry(ttl_us, now)
  if ttl_us == '' then return '' end
  return whole(now + tonumber(ttl_us))
end
